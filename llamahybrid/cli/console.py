"""Standard streams, error lines and Ctrl-C of all commands."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer


def prepare_streams() -> None:
    """Open the null device for each closed standard stream, and let printing fail on no character.

    Without a stream the next file or connection would get its number, and the output of native code.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None: closed
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def errors_shown(*more: type[Exception]) -> Iterator[None]:
    """Print our errors, and those of `more` kinds, as one line on stderr; exit status 1."""
    from llamahybrid.errors import LlamaHybridError

    kinds: tuple[type[Exception], ...] = (LlamaHybridError, *more)
    try:
        yield
    except kinds as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def ctrl_c_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt after the body for a Ctrl-C that the body has lost.

    Python ignores exceptions in callbacks of native code, such as llama.cpp's log while a model is loaded.
    A SIGINT that this process ignores, as one started by `nohup` or in the background does, stays ignored.
    """
    ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
