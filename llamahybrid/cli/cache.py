"""`llamahybrid cache`: what lies in a folder of the disk tier; nothing here runs a model."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamahybrid.cli.engine import errors_shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamahybrid.prompt_cache.base import Tokens
    from llamahybrid.prompt_cache.records import Head

cache = typer.Typer(no_args_is_help=True, help="List, show, verify and prune a folder of conversations.")

Folder = Annotated[
    Path | None, typer.Option("--dir", help="folder, as given to PromptCache(disk_dir=...)", file_okay=False)
]
Preview = Annotated[
    Path | None,
    typer.Option(help="show the text, with the vocabulary of this GGUF file", exists=True, dir_okay=False),
]

MOST_SHOWN = 200
PREVIEW_TOKENS = 60
PREVIEW_WIDTH = 36


@cache.command("list")
def list_(
    folder: Folder = None,
    records: Annotated[bool, typer.Option(help="every record, not conversations")] = False,
    preview: Preview = None,
) -> None:
    """Show what is stored: tokens, checkpoints, bytes and age, the newest last.

    Where requests had a salt, a column says which: one name for one salt, from which it cannot be told.
    Exit status 1 if something could not be read.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from llamahybrid.cli.cache_folder import CacheFolder, conversations
    from llamahybrid.prompt_cache.disk_index import DiskIndex
    from llamahybrid.prompt_cache.nodes import ID_BYTES, tokens_of

    stored, index = CacheFolder(folder), DiskIndex()
    spell = _speller(preview) if preview else None

    def seen(key: str) -> tuple[Head, Tokens]:
        """A record's head and its last tokens: all of them, of every record, may be more than fits."""
        head, ids, _ = stored.path(key)
        if not records:
            index.add(head, ids, 0)
        return head, tokens_of(ids[-ID_BYTES * PREVIEW_TOKENS :])

    found = dict(stored.sound(seen))
    rows = [[one] for one in found.values()]
    if not records:
        rows = [[found[key] for key in keys] for keys in conversations(index)]
    table = Table("model", title=escape(str(stored.store.folder.parent)))
    salted = any(_salt(head) for head, _ in found.values())
    if salted:
        table.add_column("salt", no_wrap=True)
    for name in ("tokens", "checkpoints" if not records else "state", "MiB", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    if spell:
        table.add_column("text", overflow="ellipsis", no_wrap=True, max_width=PREVIEW_WIDTH)
    for row in sorted(rows, key=lambda row: max(h.written for h, _ in row)):
        deepest, tokens = max(row, key=lambda one: one[0].end)
        states = sum(h.is_snapshot for h, _ in row)
        what = "snapshot" if deepest.is_snapshot else f"[{deepest.start:,}, {deepest.end:,})"
        cells = [
            deepest.namespace[:8],
            *([escape(_salt(deepest))] if salted else []),
            f"{deepest.end:,}",
            what if records else str(states),
            f"{sum(h.nbytes for h, _ in row) / 2**20:.1f}",
            _age(max(h.written for h, _ in row)),
        ]
        table.add_row(*cells, *([escape(spell(tokens))] if spell else []))
    console = Console()
    console.print(table)
    console.print(f"{len(found)} records, {stored.store.nbytes / 2**20:,.1f} MiB{stored.troubles()}")
    if stored.unread:
        raise typer.Exit(1)


@cache.command()
def show(
    folder: Folder = None,
    preview: Preview = None,
    most: Annotated[int, typer.Option(min=1, help="branches to show")] = MOST_SHOWN,
) -> None:
    """Show what is stored as a tree: what conversations have in common is there once, and counts once.

    What goes first when room is needed is marked, as far as the folder tells: a process that has it open
    spares what its requests rest on. Exit status 1 if something could not be read.
    """
    from rich.console import Console
    from rich.markup import escape

    from llamahybrid.cli.cache_folder import CacheFolder
    from llamahybrid.cli.cache_tree import trees
    from llamahybrid.prompt_cache.disk_index import DiskIndex
    from llamahybrid.prompt_cache.outline import outline_of_index

    stored, index = CacheFolder(folder), DiskIndex()
    spell = _speller(preview) if preview else None

    def noted(key: str) -> float:
        """When a record was used last; it is in the index then."""
        head, ids, used = stored.path(key)
        index.add(head, ids, 0)
        return used

    index.in_order_of_use(dict(stored.sound(noted)))
    seen = outline_of_index(index, most)
    console = Console()
    title = f"[bold]{escape(str(stored.store.folder.parent))}[/]"
    console.print(f"{title}  {stored.store.nbytes / 2**20:,.1f} MiB{stored.troubles()}")
    for tree in trees(seen, spell):
        console.print(tree)
    if seen.more:
        console.print(f"{seen.more:,} more conversations; --most shows them")
    if stored.unread:
        raise typer.Exit(1)


@cache.command()
def verify(
    folder: Folder = None,
    remove: Annotated[bool, typer.Option(help="remove what is damaged")] = False,
) -> None:
    """Read every record and check it; exit status 1 if any is damaged, or could not be read or removed."""
    from llamahybrid.cli.cache_folder import CacheFolder
    from llamahybrid.errors import RecordError

    stored, sound, damaged = CacheFolder(folder), 0, 0
    for key, error in stored.each(stored.store.check):
        if not isinstance(error, RecordError):
            sound += 1
            continue
        damaged += 1
        typer.echo(f"{key}: {error}")
        if remove:
            stored.remove(key)
    swept = stored.store.sweep() if remove else 0
    typer.echo(
        f"{sound} records are sound, {damaged} damaged"
        + stored.troubles()
        + (f", {swept} stray files removed" if swept else "")
    )
    if (damaged and not remove) or stored.unread or stored.stuck:
        raise typer.Exit(1)


@cache.command()
def prune(
    folder: Folder = None,
    max_mib: Annotated[
        float | None, typer.Option(min=0, help="remove the oldest until so much is left")
    ] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="remove what is older, in days")] = None,
    model: Annotated[
        str | None, typer.Option(help="remove what is of this model, as `list` names it")
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="remove what requests of this salt stored, as `list` names it")
    ] = None,
) -> None:
    """Remove records: by size, age, model, salt; several together remove what any of them names.

    By size, what is damaged goes first; else it stays: `verify --remove` removes it.
    Exit status 1 if something could not be read or removed: nothing else goes in its place.
    """
    from llamahybrid.cli.cache_folder import CacheFolder
    from llamahybrid.prompt_cache.records import Head

    if all(one is None for one in (max_mib, older_than, model, salt)):
        raise typer.BadParameter("say what to remove: --max-mib, --older-than, --model or --salt")
    for name, text in (("--model", model), ("--salt", salt)):
        if text == "":
            raise typer.BadParameter(f"{name} is empty: give it as `list` names it")
    for name, number in (("--max-mib", max_mib), ("--older-than", older_than)):
        if number is not None and not math.isfinite(number):
            raise typer.BadParameter(f"{name} is {number}: give a finite number")
    stored, before, removed = CacheFolder(folder), time.time() - 86400 * (older_than or 0), 0

    def named(head: Head) -> bool:
        """It is old, or of the model or the salt."""
        old = older_than is not None and head.written < before
        return old or (model is not None and head.namespace.startswith(model)) or _salt(head) == salt

    found = [(key, head, stored.size(key)) for key, head in stored.each(stored.store.head)]
    size, most = sum(nbytes for *_, nbytes in found), math.inf if max_mib is None else max_mib * 2**20
    found.sort(key=lambda one: one[1].written if isinstance(one[1], Head) else -1)
    for key, head, nbytes in found:
        if size > most or (isinstance(head, Head) and named(head)):
            removed, size = removed + stored.remove(key), size - nbytes
        if not isinstance(head, Head):
            typer.echo(f"{key}: {head}", err=True)
    typer.echo(f"{removed} records removed, {stored.store.nbytes / 2**20:,.1f} MiB left{stored.troubles()}")
    if stored.unread or stored.stuck:
        raise typer.Exit(1)


def _salt(head: Head) -> str:
    """What stands for the salt of the requests that a record is of; empty without one."""
    return head.namespace.partition("+")[2]


def _speller(model: Path) -> Callable[[Tokens], str]:
    """The end of a token path as text."""
    with errors_shown(ValueError, OSError, RuntimeError):
        import llama_cpp

        vocabulary = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)

    def spell(tokens: Tokens) -> str:
        known = [t for t in tokens[-PREVIEW_TOKENS:].tolist() if 0 <= t < vocabulary.n_vocab()]
        text = vocabulary.detokenize(known, special=True).decode("utf-8", errors="replace")
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line[-PREVIEW_WIDTH:]

    return spell


def _age(written: int) -> str:
    seconds = max(0, int(time.time()) - written)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
