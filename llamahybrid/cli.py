"""The command line. Each command imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.split(".")[0] + ".")


@app.callback()
def _root() -> None:
    """Prefix reuse for hybrid, recurrent and sliding-window models in llama-cpp-python."""


def _count(text: str | None) -> int | None:
    """A number with an optional K, M or G, as in 100M."""
    if text is None:
        return None
    unit = {"K": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:].upper(), 1)
    try:
        return int(float(text if unit == 1 else text[:-1]) * unit)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number like 500K, 100M or 1G") from error


@app.command()
def tiny(
    arch: Annotated[str | None, typer.Argument(help="architecture, as llama.cpp names it")] = None,
    out: Annotated[Path | None, typer.Argument(help="GGUF file to write")] = None,
    vocab: Annotated[str, typer.Option(help="tiny, qwen35, llama-spm or bert-bge")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    embd: Annotated[int | None, typer.Option(min=1, help="width")] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    params: Annotated[str | None, typer.Option(help="about this many weights, e.g. 100M")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="sliding window in tokens")] = None,
    context: Annotated[int, typer.Option(min=1, help="context length it claims")] = 65536,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    list_: Annotated[bool, typer.Option("--list", help="show what can be made, and what cannot")] = False,
) -> None:
    """Write a random-weight model of any architecture; the same arguments give the same bytes."""
    from llamahybrid import tiny as models
    from llamahybrid.errors import LlamaHybridError

    if list_:
        typer.echo("\n".join(models.architectures()))
        for name, reason in models.impossible().items():
            typer.echo(f"{name}: cannot be made: {reason}")
        return
    if arch is None or out is None:
        raise typer.BadParameter("give an architecture and a file to write, or --list")
    if vocab not in models.VOCABULARIES:
        raise typer.BadParameter(f"--vocab is one of {', '.join(models.VOCABULARIES)}")
    try:
        path = models.make(
            arch,
            out,
            vocab=vocab,
            layers=layers,
            embd=embd,
            heads=heads,
            params=_count(params),
            window=window,
            context=context,
            seed=seed,
        )
    except LlamaHybridError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{path}: {path.stat().st_size:,} bytes")
