"""Processes that are started for a while: what they import, and that nothing of them stays behind."""

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
    """A command that runs a module as `python -m` does, but that the working folder comes last in `sys.path`.

    Where it comes first, a checkout of llama-cpp-python has its own `llama_cpp` taken, which is not built.
    """
    return sys.executable, "-c", _RUN.format(module)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGHUP end this process as Ctrl-C does: children and temporary files go with it.

    For main threads; a signal that is ignored, as under nohup, stays so.
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
