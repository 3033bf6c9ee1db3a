"""``llamahybrid bench``: the peers side by side, on your model and machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from llamahybrid.children import ended_in_order
from llamahybrid.cli.check import Lib
from llamahybrid.cli.engine import errors_shown
from llamahybrid.cli.progress import progress

if TYPE_CHECKING:
    from llamahybrid.harness.bench import Cell, Results

PEERS = ("stock", "stock+ram", "ours")

On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        help=f"{', '.join(PEERS)} (the default), stock+disk (each may have @LIB), server:PATH, or a URL; "
        "LABEL= before it names it; repeatable",
    ),
]


def bench(
    model: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="GGUF file")],
    on: On = None,
    lib: Lib = None,
    rounds: Annotated[int, typer.Option(min=1, help="times are medians of so many")] = 3,
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="at once; repeatable; default: 1, 4, 8")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    n_gpu_layers: Annotated[int, typer.Option(help="layers on the GPU; -1: all")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="write the results here, part by part")] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="time for all of it: conversations are shortened to fit; 0: no limit")
    ] = 5,
) -> None:
    """Tokens decoded over the least possible, time to first token, throughput, restart, memory, saves.

    Ctrl-C ends it with the results so far (exit status 130); --json is written after each part.
    """
    import os

    from llamahybrid.files import require_writable, write_json
    from llamahybrid.harness.bench import Bench
    from llamahybrid.harness.targets import choice
    from llamahybrid.harness.targets.base import ModelFile

    n = threads or os.cpu_count() or 1
    layers = {"n_gpu_layers": n_gpu_layers} if n_gpu_layers else {}
    options = {"n_threads": n, "n_threads_batch": n, **layers}
    server = ["-t", str(n), *(("-ngl", "999" if n_gpu_layers < 0 else str(n_gpu_layers)) if layers else ())]
    with ended_in_order(), errors_shown(ValueError, OSError):
        require_writable(json)
        targets = choice.targets(on or PEERS, lib, server)
        with progress() as told:
            file = ModelFile(model.name, model, options, server)
            run = Bench(
                targets, file, rounds, tuple(clients or (1, 4, 8)), progress=told, minutes=minutes or None
            )
            if json is not None:
                run.found = lambda results: write_json(json, results.as_json())
            results = run.run()
    show(results)
    if not results.complete:
        typer.echo("stopped, or out of time (--minutes): not all was measured", err=True)
        raise typer.Exit(130)
    if any(cell.error for cell in results.cells):
        raise typer.Exit(1)


def show(results: Results) -> None:
    """A line a workload and target; then what it takes to save a state, and to restore it."""
    from llamahybrid.harness.bench import SAVED
    from llamahybrid.harness.render.formatting import length

    console = Console()
    table = Table(
        "workload",
        "target",
        title=f"{results.model['name']}, median of {results.rounds}{length(results.scale)}",
    )
    for head in ("decoded / least", "first token", "tokens/s", "MiB a chat"):
        table.add_column(head, justify="right")
    before = None
    for cell in (each for each in results.cells if each.workload != SAVED):
        name = "" if cell.workload == before else cell.workload
        if name and before is not None:
            table.add_section()
        before = cell.workload
        if cell.error:
            table.add_row(name, cell.target, "[red]failed[/]")
            continue
        table.add_row(
            name,
            cell.target,
            "cannot tell" if cell.ratio is None else f"{cell.ratio:.3f}",
            "" if cell.ttft is None else f"{cell.ttft:.3f} s",
            "" if cell.tokens_per_second is None else f"{cell.tokens_per_second:.1f}",
            "" if cell.resident is None else f"{cell.resident / (1 << 20):.1f}",
        )
    console.print(table)
    saved = [cell for cell in results.cells if cell.workload == SAVED]
    if saved:
        console.print(_savings(saved))
    for cell in results.cells:
        if cell.error:
            console.print(f"error: {cell.target}, {cell.workload}: {cell.error}", markup=False)


def _savings(cells: Sequence[Cell]) -> Table:
    """Milliseconds, each beside a memcpy of as many bytes."""
    from llamahybrid.harness.bench import SAVED_TOKENS

    table = Table("target", title=f"a state of {SAVED_TOKENS:,} tokens, saved and restored in memory")
    table.add_column("MiB", justify="right", no_wrap=True)
    for head in ("memcpy", "save", "restore", "save / memcpy", "restore / memcpy"):
        table.add_column(head, justify="right")
    for cell in cells:
        found = cell.saving
        if found is None:
            table.add_row(cell.target, "[red]failed[/]" if cell.error else "cannot tell")
            continue
        times = (found.memcpy, found.save, found.restore)
        ratios = (found.save / found.memcpy, found.restore / found.memcpy)
        cells_ = [f"{1e3 * seconds:.2f} ms" for seconds in times] + [f"{ratio:.1f}" for ratio in ratios]
        table.add_row(cell.target, f"{found.bytes / (1 << 20):.1f}", *cells_)
    return table
