"""``llamahybrid bench``: targets side by side, on your model and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamahybrid.children import ended_in_order
from llamahybrid.cli.check import Json, Lib, finish
from llamahybrid.cli.console import errors_shown, progress
from llamahybrid.files import require_writable, write_so_far

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
    json: Json = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="time for all of it: conversations are shortened to fit; 0: no limit")
    ] = 5,
) -> None:
    """Tokens decoded over the least possible, time to first token, throughput, restart, memory, saves.

    Ctrl-C ends it with the results so far (exit status 130); --json is written after each part.
    """
    from llamahybrid.harness.bench import Bench
    from llamahybrid.harness.check import model_file
    from llamahybrid.harness.targets import choice

    with ended_in_order(), errors_shown(ValueError, OSError):
        require_writable(json)
        file = model_file(model.name, model, n_gpu_layers, threads)
        targets = choice.targets(on or PEERS, lib)
        with progress() as told:
            at_once = tuple(clients or (1, 4, 8))
            run = Bench(targets, file, rounds, at_once, progress=told, minutes=minutes or None)
            if json is not None:
                run.found = lambda so_far: write_so_far(json, so_far.write)
            report = run.run()
    finish(report, json)
