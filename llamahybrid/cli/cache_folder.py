"""The records of a cache folder for the commands, which report errors of the disk and continue."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from llamahybrid.configuration import default_folder
from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.block_store import BlockStore
from llamahybrid.prompt_cache.blocks import Item
from llamahybrid.prompt_cache.bytes_disk import SHARDS
from llamahybrid.prompt_cache.disk import DiskRows
from llamahybrid.prompt_cache.folder import FOLDER
from llamahybrid.prompt_cache.nodes import ID_BYTES, tokens_of

NAME_LETTERS = 8
"""Letters of a model's fingerprint that are shown."""


@dataclass(frozen=True)
class Found:
    """A record of a folder."""

    item: Item
    namespace: str
    ids: bytes
    """The tokens of the whole prefix, see `nodes.ids_of`."""
    written: int
    """When a checkpoint that needs it was written last, in seconds since 1970."""

    @property
    def tokens(self) -> Tokens:
        """The same as an array."""
        return tokens_of(self.ids)

    @property
    def name(self) -> str:
        """The name in the commands' output."""
        return name_of(self.item.key)

    @property
    def salt(self) -> str:
        """The digest of its requests' salt; empty: none."""
        return self.namespace.partition("+")[2]


class CacheFolder:
    """The records in a folder. Reading them does not count as use, so the order of eviction stays."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None: that of `chat --keep`. Without records: print the reason and raise typer.Exit."""
        self.rows = _opened(default_folder() if folder is None else folder)
        self.store = BlockStore(self.rows)
        self.unread = 0
        """Records that could not be read now; they may be sound."""
        self.stuck = 0
        """Records that could not be removed."""

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.rows.nbytes

    def found(self) -> list[Found]:
        """All records, least recently used first."""
        stored = sorted(self.store.each(), key=lambda one: one.node.written)
        sizes = self.rows.sizes(list({key for one in stored for key in one.keys}))
        there = {
            item.key: Found(item, one.namespace, one.ids[: ID_BYTES * item.end], one.node.written)
            for one in stored
            for item in one.items(sizes)
        }
        used = self.rows.last_used(list(there))
        return sorted((there[key] for key in used), key=lambda one: used[one.item.key])

    def lost(self, found: Sequence[Found]) -> list[bytes]:
        """Keys of records without a path."""
        known = {one.item.key for one in found}
        return [key for kind in (b"r", b"a") for key in self.rows.keys(kind) if key not in known]

    def check(self, one: Found) -> RecordError | None:
        """Read a whole record and return its damage; None: sound, or unreadable now (printed and counted)."""
        try:
            self.store.read(one.namespace, one.tokens, one.item)
        except RecordError as error:
            return error
        except (OSError, MemoryError) as error:
            self.unread += 1
            typer.echo(f"{one.name}: {error or 'no memory for it'}", err=True)
        return None

    def remove(self, key: bytes) -> bool:
        """Remove a record; False if the disk refuses."""
        try:
            self.rows.remove(key)
        except OSError as error:
            self.stuck += 1
            typer.echo(f"{name_of(key)}: {error}", err=True)
            return False
        return True

    def tidy(self) -> int:
        """Remove nodes without records, and files of killed processes; return the number of files."""
        self.store.remove_rows(self.store.unneeded())
        return sum(self.rows.sweep(shard) for shard in range(SHARDS))

    def troubles(self) -> str:
        """The numbers of failures, to end a line with; empty: none."""
        counts = ((self.unread, "could not be read"), (self.stuck, "could not be removed"))
        return "".join(f", {count} {what}" for count, what in counts if count)


def name_of(key: bytes) -> str:
    """The name of a record: the beginning of its file's name."""
    return key[1:].hex()


def age(written: float) -> str:
    """The age in its largest unit."""
    seconds = max(0, int(time.time() - written))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _opened(folder: Path) -> DiskRows:
    try:
        folder = folder.expanduser()
        os.stat(folder / FOLDER)
        rows = DiskRows(folder)
        rows.open()
        return rows
    except (FileNotFoundError, NotADirectoryError) as error:
        typer.echo(f"error: nothing is stored in {folder}", err=True)
        raise typer.Exit(1) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        typer.echo(f"error: {folder} cannot be used: {error}", err=True)
        raise typer.Exit(1) from error
