"""Signals that end the chat while a line is read, none of them missed.

The readline module looks for signals only where one interrupts its `select` (CPython, Modules/readline.c,
readline_until_enter_or_signal): one that arrives just before waits for the next key.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AGAIN_SECONDS = 0.2
"""Time between two deliveries of a signal that was not handled yet."""


@contextmanager
def delivered(handled: Callable[[], bool]) -> Iterator[None]:
    """Deliver SIGTERM and SIGHUP to the main thread again until `handled()`, in the body.

    Enter in the main thread. The handlers of these signals must bear to be called more than once.
    """
    if not hasattr(signal, "pthread_kill"):  # Windows
        yield
        return
    main = threading.get_ident()
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        over = threading.Event()

        def watch() -> None:
            while (numbers := ours.recv(64)) and not over.is_set():
                for number in {signal.SIGTERM, signal.SIGHUP}.intersection(numbers):
                    while not over.wait(AGAIN_SECONDS) and not handled():
                        signal.pthread_kill(main, number)

        watcher = threading.Thread(target=watch, name="llamahybrid-signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(before)
            theirs.shutdown(socket.SHUT_RDWR)
            watcher.join()
