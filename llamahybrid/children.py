"""Child processes: their import path, and their end together with the parent."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_RUN = """
import runpy, sys
if "" in sys.path:
    sys.path.remove("")
    sys.path.append("")
runpy.run_module({!r}, run_name="__main__")
"""


def python(module: str) -> tuple[str, ...]:
    """A command like `python -m MODULE`, with the working folder last in `sys.path`.

    First, as with `python -m`, a checkout of llama-cpp-python would shadow the installed package.
    """
    return sys.executable, "-c", _RUN.format(module)


def ending(status: int) -> str:
    """Return in words how a child with this return code ended: its exit status, or the name of a signal."""
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):  # real-time signals have no name
        return signal.Signals(-status).name
    return f"signal {-status}"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP in the body, to clean up children and temporary files.

    Has no effect outside of the main thread. Ignored signals, as under nohup, stay ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    changed = {}
    for name in ("SIGTERM", "SIGHUP"):
        with suppress(AttributeError, ValueError):  # not on this system; not the main thread
            number = getattr(signal, name)
            if signal.getsignal(number) is signal.SIG_DFL:
                changed[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, before in changed.items():
            signal.signal(number, before)
