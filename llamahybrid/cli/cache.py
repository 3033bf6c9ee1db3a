"""`llamahybrid cache`: what lies in a folder of the disk tier; nothing here runs a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamahybrid.configuration import default_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamahybrid.prompt_cache.base import Tokens
    from llamahybrid.prompt_cache.disk import RecordStore
    from llamahybrid.prompt_cache.disk_index import DiskIndex
    from llamahybrid.prompt_cache.records import Head

cache = typer.Typer(no_args_is_help=True, help="List, show, verify and prune a folder of conversations.")

Folder = Annotated[
    Path | None, typer.Option("--dir", help="folder, as given to PromptCache(disk_dir=...)", file_okay=False)
]

MOST_SHOWN = 200
PREVIEW_TOKENS = 60
PREVIEW_WIDTH = 36


@cache.command("list")
def list_(
    folder: Folder = None,
    records: Annotated[bool, typer.Option(help="every record, not conversations")] = False,
    preview: Annotated[
        Path | None, typer.Option(help="show the text, with the vocabulary of this GGUF file", exists=True)
    ] = None,
) -> None:
    """Show what is stored: tokens, checkpoints, bytes and age, the newest last.

    Where requests had a salt, a column says which: one name for one salt, from which it cannot be told.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    store = _opened(folder)
    found = [(head, tokens) for _, head, tokens in _heads(store)]
    rows = [[one] for one in found] if records else _conversations(found)
    spell = _speller(preview) if preview else None
    table = Table("model", title=str(store.folder.parent))
    salted = any(_salt(head) for head, _ in found)
    if salted:
        table.add_column("salt", no_wrap=True)
    for name in ("tokens", "checkpoints" if not records else "state", "MiB", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    if spell:
        table.add_column("text", overflow="ellipsis", no_wrap=True, max_width=PREVIEW_WIDTH)
    for row in sorted(rows, key=lambda row: max(h.written for h, _ in row)):
        deepest, tokens = max(row, key=lambda one: one[0].end)
        states = sum(h.kind == 0 for h, _ in row)
        what = f"[{deepest.start:,}, {deepest.end:,})" if deepest.kind else "snapshot"
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
    console.print(f"{len(found)} records, {store.nbytes / 2**20:,.1f} MiB")


@cache.command()
def show(
    folder: Folder = None,
    preview: Annotated[
        Path | None, typer.Option(help="show the text, with the vocabulary of this GGUF file", exists=True)
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="branches to show")] = MOST_SHOWN,
) -> None:
    """Show what is stored as a tree: what conversations have in common is there once, and counts once.

    What goes first when room is needed is marked, as far as the folder tells: a process that has it open
    spares what its requests rest on.
    """
    from rich.console import Console
    from rich.markup import escape

    from llamahybrid.cli.cache_tree import trees
    from llamahybrid.prompt_cache.outline import outline_of_index

    store = _opened(folder)
    seen = outline_of_index(_index(store), most)
    spell = _speller(preview) if preview else None
    console = Console()
    console.print(f"[bold]{escape(str(store.folder.parent))}[/]  {store.nbytes / 2**20:,.1f} MiB")
    for tree in trees(seen, spell):
        console.print(tree)
    if seen.more:
        console.print(f"{seen.more:,} more conversations; --most shows them")


@cache.command()
def verify(
    folder: Folder = None,
    remove: Annotated[bool, typer.Option(help="remove what is damaged")] = False,
) -> None:
    """Read every record and check it; exit status 1 if any is damaged."""
    from llamahybrid.errors import RecordError, RecordGone

    store, sound, damaged, unread = _opened(folder), 0, 0, 0
    for key in sorted(store.keys()):
        try:
            store.load(key)
            sound += 1
        except OSError as error:  # it may be sound
            unread += 1
            typer.echo(f"{key}: {error}")
        except RecordGone:
            continue
        except RecordError as error:
            damaged += 1
            typer.echo(f"{key}: {error}")
            if remove:
                store.delete(key)
    swept = store.sweep() if remove else 0
    typer.echo(
        f"{sound} records are sound, {damaged} damaged"
        + (f", {unread} could not be read" if unread else "")
        + (f", {swept} stray files removed" if swept else "")
    )
    if (damaged and not remove) or unread:
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
    """Remove records: by size, age, model, salt; several together remove what any of them names."""
    if all(one is None for one in (max_mib, older_than, model, salt)):
        raise typer.BadParameter("say what to remove: --max-mib, --older-than, --model or --salt")
    store, before, removed = _opened(folder), time.time() - 86400 * (older_than or 0), 0
    size = store.nbytes
    for key, head, _ in sorted(_heads(store), key=lambda item: item[1].written):
        old = older_than is not None and head.written < before
        of_model = model is not None and head.namespace.startswith(model)
        of_salt = bool(salt) and _salt(head) == salt
        if old or of_model or of_salt or (max_mib is not None and size > max_mib * 2**20):
            store.delete(key)
            removed, size = removed + 1, size - head.nbytes
    typer.echo(f"{removed} records removed, {store.nbytes / 2**20:,.1f} MiB left")


def _opened(folder: Path | None) -> RecordStore:
    from llamahybrid.prompt_cache.disk import RecordStore
    from llamahybrid.prompt_cache.disk_folder import FOLDER

    folder = default_folder() if folder is None else folder.expanduser()
    if not (folder / FOLDER).is_dir():
        typer.echo(f"error: nothing is stored in {folder}", err=True)
        raise typer.Exit(1)
    try:
        return RecordStore(folder)
    except OSError as error:
        typer.echo(f"error: {folder} cannot be used: {error}", err=True)
        raise typer.Exit(1) from error


def _heads(store: RecordStore) -> Iterator[tuple[str, Head, Tokens]]:
    from llamahybrid.errors import RecordError

    for key in sorted(store.keys()):
        try:
            yield (key, *store.head(key))
        except (RecordError, OSError) as error:
            typer.echo(f"{key}: {error}", err=True)


def _index(store: RecordStore) -> DiskIndex:
    """Where the records of a folder lie, and which of them were used last."""
    from llamahybrid.errors import RecordError
    from llamahybrid.prompt_cache.disk_index import DiskIndex
    from llamahybrid.prompt_cache.records import read_ids

    index, used = DiskIndex(), dict[str, float]()
    for key in sorted(store.keys()):
        try:
            with store.opened(key) as (file, head, used_at):
                index.add(head, read_ids(file, head), 0)
                used[key] = used_at
        except (RecordError, OSError) as error:
            typer.echo(f"{key}: {error}", err=True)
    index.in_order_of_use(used)
    return index


def _salt(head: Head) -> str:
    """What stands for the salt of the requests that a record is of; empty without one."""
    return head.namespace.partition("+")[2]


def _conversations(found: list[tuple[Head, Tokens]]) -> list[list[tuple[Head, Tokens]]]:
    """Records by the longest path they belong to; what several share counts for the first."""
    groups: list[list[tuple[Head, Tokens]]] = []
    for head, tokens in sorted(found, key=lambda one: -one[0].end):
        for group in groups:
            first, path = group[0]
            if first.namespace == head.namespace and (path[: head.end] == tokens).all():
                group.append((head, tokens))
                break
        else:
            groups.append([(head, tokens)])
    return groups


def _speller(model: Path) -> Callable[[Tokens], str]:
    """The end of a token path as text."""
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
