"""What the engine that this process runs is, by the content of its libraries."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import xxhash

from llamahybrid.engine import installed, series
from llamahybrid.engine.bindings import loaded_from
from llamahybrid.engine.content import Signature, digest

_OURS = re.compile(r"(lib)?(llama|ggml)[^/\\]*\.(so|dylib|dll)[.\d]*")
_DELETED = " (deleted)"


def libraries() -> list[Path]:
    """The files of libllama and of the ggml backends that are loaded.

    Linux says which are; elsewhere they are those beside libllama. Raises OSError when one that runs is gone
    from the file system: then what runs has no name.
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
    """16 bytes that name the engine of this process. Raises OSError when its libraries cannot be read."""
    found = libraries()
    if not found:
        raise OSError("the libraries of llama.cpp cannot be found")
    signatures = [(path, Signature.of(path)) for path in found]
    known = _known.get(tuple(signatures))
    if known is not None:
        return known
    hasher = xxhash.xxh3_128()
    for name in sorted(map(digest, found)):
        hasher.update(name)
    if all(signature.settled for _, signature in signatures):
        _known[tuple(signatures)] = hasher.digest()
    return hasher.digest()


def patches() -> frozenset[str]:
    """The numbers of the patches that the engine of this process has: of one that was built here, else none.

    What its manifest says counts only while its libraries are those that were built.
    """
    folder = loaded_from()
    engine = installed.owner(folder) if folder else None
    if engine is None or not engine.files or engine.damage():
        return frozenset()
    return frozenset(map(series.number, engine.patches))


_known: dict[tuple[tuple[Path, Signature], ...], bytes] = {}


def _mapped() -> Iterator[str]:
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(os.sep):
                yield fields[5]
