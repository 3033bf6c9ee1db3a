"""Check that no other user could have written a file, by the rules of ssh's StrictModes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path


def untrusted(place: Path) -> str:
    """Why a file or folder must not be executed: another user could have written it; empty: it may be.

    Its content, and all folders above it up to the home folder, also above the targets of links, must belong
    to this user or root and be writable by nobody else. Sticky folders such as ``/tmp`` are accepted (others
    can only add files of their own there), and so is the user's private group.
    """
    if sys.platform == "win32":
        return ""
    above = {path: None for start in (place.absolute(), place.resolve()) for path in _above(start)}
    inside = sorted(place.rglob("*")) if place.is_dir() else [place]
    return next(filter(None, (_problem(path) for path in (*inside, *above))), "")


def _above(place: Path) -> Iterable[Path]:
    home = Path(os.path.expanduser("~"))
    for path in (place, *place.parents):
        yield path
        if path == home:
            return


def _problem(path: Path) -> str:
    try:
        info = path.stat()
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    if info.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (uid {info.st_uid})"
    if stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX:
        return ""
    if info.st_mode & stat.S_IWOTH:
        return f"{path} can be written by others: chmod o-w it"
    if info.st_mode & stat.S_IWGRP and not _private(info.st_gid):
        return f"{path} can be written by its group: chmod g-w it"
    return ""


def _private(group: int) -> bool:
    """Tell whether this user is the group's only member, as Debian and Fedora set up each user."""
    if sys.platform == "win32":
        return True
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
