"""Check that no other user could have written a file, by the rules of ssh's StrictModes."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path


def untrusted(folder: Path) -> str:
    """Say why a folder of libraries must not be loaded: another user could have written it; empty: it may be.

    Its content, and all folders above it up to the home folder, also above the target of a link, must belong
    to this user or root and be writable by nobody else. Above it, sticky folders such as ``/tmp`` are fine
    (others can only add files of their own there), and so is the user's private group.
    """
    above = dict.fromkeys((*_above(folder.absolute()), *_above(folder.resolve())))
    problems = chain(
        (access(path) for path in (folder, *folder.rglob("*"))), (access(path, above=True) for path in above)
    )
    return next(filter(None, problems), "")


def access(path: Path | int, above: bool = False) -> str:
    """Say how another user than this one and root may write a file (a path or descriptor); empty: not at all.

    Args:
        above: it is a folder above the files in question.
    """
    if sys.platform == "win32":
        return ""
    try:
        status = os.stat(path)
    except OSError:
        return ""  # it cannot be read either
    if status.st_uid not in (0, os.geteuid()):
        return (
            f"{path} belongs to another user (uid {status.st_uid}): set LLAMAHYBRID_CACHE_DIR to a folder of "
            "your own, or `chown` it, and run `llamahybrid engine build --force`"
        )
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if above and (status.st_mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _private(status.st_gid))):
        return ""
    return f"{path} can be written by others: `chmod go-w {shlex.quote(str(path))}`" if writers else ""


def _above(folder: Path) -> Iterator[Path]:
    home = Path(os.path.expanduser("~"))
    for path in folder.parents:
        yield path
        if path == home:
            return


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
