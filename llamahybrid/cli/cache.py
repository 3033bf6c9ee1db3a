"""`llamahybrid cache`: show, verify and prune a cache folder, without running a model."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamahybrid.cli.console import errors_shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamahybrid.prompt_cache.base import Tokens

cache = typer.Typer(no_args_is_help=True, help="Show, verify and prune a folder of conversations.")

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


@cache.command("list", help="The same as show.")
@cache.command()
def show(
    folder: Folder = None,
    preview: Preview = None,
    most: Annotated[int, typer.Option(min=1, help="branches to show")] = MOST_SHOWN,
) -> None:
    """Show the records as a tree for each model and salt, with the common prefixes of conversations once.

    A branch has tokens, checkpoints, bytes and age. Each checkpoint has its reason: tip, prompt, system,
    branch or rung (docs/guide/caching.md). The records to be evicted next are marked; a process that has the
    folder open spares those in use."""
    from rich.console import Console
    from rich.markup import escape

    from llamahybrid.cli.cache_folder import CacheFolder
    from llamahybrid.cli.cache_tree import trees
    from llamahybrid.prompt_cache.outline import outline_of_places

    stored = CacheFolder(folder)
    spell = _speller(preview) if preview else None
    found = stored.found()
    placed = [(one.namespace, one.ids, [one.item]) for one in reversed(found)]
    seen = outline_of_places(placed, found[0].item.key if found else b"", most)
    console = Console()
    console.print(f"[bold]{escape(str(stored.rows.folder.parent))}[/]")
    for tree in trees(seen, {(one.namespace, one.ids): one.written for one in found}, spell):
        console.print(tree)
    if seen.more:
        console.print(f"{seen.more:,} more conversations; --most shows them")
    console.print(f"{len(found)} records, {stored.nbytes / 2**20:,.1f} MiB{stored.troubles()}")


@cache.command()
def verify(
    folder: Folder = None,
    remove: Annotated[bool, typer.Option(help="remove damaged records")] = False,
) -> None:
    """Read every record and check it; exit status 1 if any is damaged, or could not be read or removed."""
    from llamahybrid.cli.cache_folder import CacheFolder, name_of

    stored = CacheFolder(folder)
    found = stored.found()
    wrong = [(one, error) for one in found if (error := stored.check(one)) is not None]
    lost = stored.lost(found)
    for one, error in wrong:
        typer.echo(f"{one.name}: {error}")
    for key in lost:
        typer.echo(f"{name_of(key)}: no path leads to it")
    swept = 0
    if remove:
        for one, _ in wrong:
            stored.remove(one.item.key)
        for key in lost:
            stored.remove(key)
        swept = stored.tidy()
    damaged = len(wrong) + len(lost)
    typer.echo(
        f"{len(found) - len(wrong) - stored.unread} records are sound, {damaged} damaged"
        + stored.troubles()
        + (f", {swept} stray files removed" if swept else "")
    )
    if (damaged and not remove) or stored.unread or stored.stuck:
        raise typer.Exit(1)


@cache.command()
def prune(
    folder: Folder = None,
    max_mib: Annotated[
        float | None, typer.Option(min=0, help="remove the least recently used records beyond this many MiB")
    ] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="remove older records, in days")] = None,
    model: Annotated[
        str | None, typer.Option(help="remove records of this model, as `list` names it")
    ] = None,
    salt: Annotated[str | None, typer.Option(help="remove records of this salt, as `list` names it")] = None,
) -> None:
    """Remove records that match any of the options.

    By size the least recently used records go first. Damaged records stay: `verify --remove` removes them.
    Exit status 1 if a record could not be removed.
    """
    from llamahybrid.cli.cache_folder import CacheFolder, Found

    if all(one is None for one in (max_mib, older_than, model, salt)):
        raise typer.BadParameter("say what to remove: --max-mib, --older-than, --model or --salt")
    for name, text in (("--model", model), ("--salt", salt)):
        if text == "":
            raise typer.BadParameter(f"{name} is empty: give it as `list` names it")
    for name, number in (("--max-mib", max_mib), ("--older-than", older_than)):
        if number is not None and not math.isfinite(number):
            raise typer.BadParameter(f"{name} is {number}: give a finite number")
    stored, before, removed = CacheFolder(folder), time.time() - 86400 * (older_than or 0), 0

    def named(one: Found) -> bool:
        """Tell whether a record is old, or of the model or the salt."""
        old = older_than is not None and one.written < before
        return old or (model is not None and one.namespace.startswith(model)) or one.salt == salt

    found = stored.found()
    size, most = sum(one.item.nbytes for one in found), math.inf if max_mib is None else max_mib * 2**20
    for one in found:
        if size > most or named(one):
            removed, size = removed + stored.remove(one.item.key), size - one.item.nbytes
    stored.tidy()
    typer.echo(f"{removed} records removed, {stored.nbytes / 2**20:,.1f} MiB left{stored.troubles()}")
    if stored.stuck:
        raise typer.Exit(1)


def _speller(model: Path) -> Callable[[Tokens], str]:
    """A function that returns the end of a token path as text."""
    with errors_shown(ValueError, OSError, RuntimeError):
        import llama_cpp

        from llamahybrid.capi.gguf import quiet

        with quiet():  # a vocabulary has no context length, which llama.cpp warns of
            vocabulary = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)

    def spell(tokens: Tokens) -> str:
        known = [t for t in tokens[-PREVIEW_TOKENS:].tolist() if 0 <= t < vocabulary.n_vocab()]
        text = vocabulary.detokenize(known, special=True).decode("utf-8", errors="replace")
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line[-PREVIEW_WIDTH:]

    return spell
