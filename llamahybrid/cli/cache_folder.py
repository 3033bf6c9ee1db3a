"""A folder of the disk tier as the commands look at it: what the disk refuses is said, and they go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import typer

from llamahybrid.configuration import default_folder
from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_folder import FOLDER
from llamahybrid.prompt_cache.disk_index import DiskIndex, on_disk
from llamahybrid.prompt_cache.nodes import Node
from llamahybrid.prompt_cache.records import Head, read_ids

Found = TypeVar("Found")


class CacheFolder:
    """The records in a folder. Looking at them is no use of them: what goes next stays what it was."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None for that of `chat --keep`. Says why and raises typer.Exit where there are none."""
        self.store = _opened(default_folder() if folder is None else folder)
        self.unread = 0
        """Records, or folders of records, that could not be read; they may be sound."""
        self.stuck = 0
        """Records that could not be removed."""

    def each(self, read: Callable[[str], Found]) -> Iterator[tuple[str, Found | RecordError]]:
        """What is read of each record that is there, by key, or how it is damaged."""
        for key in sorted(self.store.keys(refused=self._refused)):
            try:
                found = _read(read, key)
            except RecordGone:
                continue
            except (OSError, MemoryError) as error:
                self._refused(error, key)
            else:
                yield key, found

    def sound(self, read: Callable[[str], Found]) -> Iterator[tuple[str, Found]]:
        """The same, but damage is only said."""
        for key, found in self.each(read):
            if isinstance(found, RecordError):
                typer.echo(f"{key}: {found}", err=True)
            else:
                yield key, found

    def path(self, key: str) -> tuple[Head, bytes, float]:
        """What a record says of itself, the ids of its whole prefix, and when it was used last."""
        with self.store.opened(key) as (file, head, used):
            return head, read_ids(file, head), used

    def size(self, key: str) -> int:
        """Bytes of a record, sound or not; 0 where that cannot be told."""
        try:
            return self.store.size(key)
        except OSError:
            return 0

    def remove(self, key: str) -> bool:
        """Remove a record; False if it stays."""
        try:
            self.store.delete(key)
        except OSError as error:
            self.stuck += 1
            typer.echo(f"{key}: {error}", err=True)
            return False
        return True

    def troubles(self) -> str:
        """What could not be done, as the end of a line; empty for nothing."""
        counts = ((self.unread, "could not be read"), (self.stuck, "could not be removed"))
        return "".join(f", {count} {what}" for count, what in counts if count)

    def _refused(self, error: OSError | MemoryError, key: str = "") -> None:
        self.unread += 1
        typer.echo((f"{key}: " if key else "") + (str(error) or "no memory for it"), err=True)


def conversations(index: DiskIndex) -> list[list[str]]:
    """Keys by the longest path they belong to, longest first; what several share counts for the first."""
    groups, taken = list[list[str]](), set[Node]()
    for leaf in sorted(_leaves(index), key=lambda leaf: (-leaf.end, _keys(leaf)[:1])):
        group: list[str] = []
        for node in leaf.path():
            if node in taken:  # and so is all above
                break
            taken.add(node)
            group += _keys(node)
        groups.append(group)
    return groups


def _keys(node: Node) -> list[str]:
    """What ends on an edge, the deepest first; a leaf has records where it ends."""
    return [key for place in reversed(on_disk(node).places) for key in sorted(r.key for r in place.records)]


def _leaves(index: DiskIndex) -> Iterator[Node]:
    nodes = [child for name in index.tree.namespaces() for child in index.tree.root(name).children.values()]
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children.values())
        if not node.children:
            yield node


def _read(read: Callable[[str], Found], key: str, *, again: bool = True) -> Found | RecordError:
    """What is read; only twice damaged is damaged: it may have been written right meanwhile."""
    try:
        return read(key)
    except RecordGone:
        raise
    except RecordError as error:
        return _read(read, key, again=False) if again else error


def _opened(folder: Path) -> RecordStore:
    try:
        folder = folder.expanduser()
        os.stat(folder / FOLDER)
        return RecordStore(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        typer.echo(f"error: nothing is stored in {folder}", err=True)
        raise typer.Exit(1) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of somebody who has no home
        typer.echo(f"error: {folder} cannot be used: {error}", err=True)
        raise typer.Exit(1) from error
