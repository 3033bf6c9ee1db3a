"""What is printed where not each letter can be: in a locale without UTF-8, or of a name that is no text."""

from __future__ import annotations

import codecs
import io
import os
import sys

_NEAREST = "llamahybrid-nearest"


def _nearest(error: UnicodeError) -> tuple[bytes, int]:
    """The bytes that a file's name came of; a question mark for what cannot be written."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    found = (ord(each) - 0xDC00 if "\udc80" <= each <= "\udcff" else ord("?") for each in letters)
    return bytes(found), error.end


codecs.register_error(_NEAREST, _nearest)


def require_descriptors() -> None:
    """Open the null device for each standard stream that is closed.

    The next file or connection would have its number, and what native code prints would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def print_anything() -> None:
    """From now on nothing that is printed raises UnicodeEncodeError: what was measured is worth a `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors=_NEAREST)
