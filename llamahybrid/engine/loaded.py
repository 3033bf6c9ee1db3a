"""Identity of the engine that is loaded in this process: the content of its libraries."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import xxhash

from llamahybrid.engine import installed
from llamahybrid.engine.bindings import loaded_from
from llamahybrid.engine.content import digest

_OURS = re.compile(r"(lib)?(llama|ggml)[^/\\]*\.(so|dylib|dll)[.\d]*")
_DELETED = " (deleted)"


def libraries() -> list[Path]:
    """The files of libllama and of the loaded ggml backends.

    Linux lists the loaded files; on other systems all files beside libllama count. Raises OSError if a loaded
    file was deleted or replaced, since its content is then unknown.
    """
    if sys.platform == "linux":
        found = {
            name for name in _mapped() if _OURS.fullmatch(name.removesuffix(_DELETED).rpartition("/")[2])
        }
        gone = [name for name in found if name.endswith(_DELETED)]
        if gone:
            raise OSError(f"{gone[0].removesuffix(_DELETED)} was replaced since it was loaded")
        return sorted(map(Path, found))
    folder = loaded_from()
    return [] if folder is None else sorted(p for p in folder.iterdir() if _OURS.fullmatch(p.name))


def engine_digest() -> bytes:
    """A digest of all loaded libraries, 16 bytes. Raises OSError if one is unreadable."""
    found = libraries()
    if not found:
        raise OSError("the libraries of llama.cpp cannot be found")
    return xxhash.xxh3_128_digest(b"".join(sorted(map(digest, found))))


def patches() -> frozenset[str]:
    """The numbers of the loaded engine's patches; empty if it was not built here, or is damaged."""
    folder = loaded_from()
    engine = installed.owner(folder) if folder else None
    return frozenset() if engine is None or engine.damage() else engine.numbers


def _mapped() -> Iterator[str]:
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(os.sep):
                yield fields[5]
