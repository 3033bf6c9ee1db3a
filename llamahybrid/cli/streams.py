"""Output in locales without UTF-8, and of file names that are not valid text."""

from __future__ import annotations

import codecs
import io
import os
import sys

_NEAREST = "llamahybrid-nearest"


def _nearest(error: UnicodeError) -> tuple[bytes, int]:
    """Encode surrogate escapes as the original bytes of a file name, other characters as `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    found = (ord(each) - 0xDC00 if "\udc80" <= each <= "\udcff" else ord("?") for each in letters)
    return bytes(found), error.end


codecs.register_error(_NEAREST, _nearest)


def require_descriptors() -> None:
    """Open the null device for each closed standard stream.

    The next file or connection would get its number, and the output of native code.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def print_anything() -> None:
    """Make printing to the standard streams never raise UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None: closed
            stream.reconfigure(errors=_NEAREST)
