"""Files that are whole or not there; results as files, without the user's home folder in them."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Write plain data, `without_home`, in the file's place once all of it is there. Raises OSError."""
    text = json.dumps(without_home(data), indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    mask = os.umask(0)
    os.umask(mask)
    write_whole(path.resolve(), text.encode("utf-8"), 0o666 & ~mask)  # a link stays one; it is no secret


def without_home(data: Any) -> Any:
    """Plain data with `~` for the user's home folder in every text: results are shown to others."""
    home = str(Path.home())
    if len(home) < 2:
        return data
    named = re.compile(rf"{re.escape(home)}(?![\w.-])")

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            return named.sub("~", value)
        if isinstance(value, dict):
            return {shown(key): shown(each) for key, each in value.items()}
        return [shown(each) for each in value] if isinstance(value, (list, tuple)) else value

    return shown(data)


def printable(text: str) -> str:
    """`text` without the control characters that XML cannot hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def write_whole(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file in the place of what is there: until all of it is written, that stays.

    Only its owner reads it, unless `mode` says otherwise. Raises OSError.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        if mode is not None:
            os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
