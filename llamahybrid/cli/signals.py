"""Reliable delivery of SIGTERM and SIGHUP while a line is read.

The readline module handles a signal only if it interrupts `select` (CPython, Modules/readline.c,
readline_until_enter_or_signal): a signal that arrives just before is delayed until the next key.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AGAIN_SECONDS = 0.2
"""Time between two deliveries of an unhandled signal."""


@contextmanager
def delivered(handled: Callable[[], bool]) -> Iterator[None]:
    """Repeat SIGTERM and SIGHUP to the main thread until `handled()`, in the body.

    Enter in the main thread. The handlers of these signals may run more than once.
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
