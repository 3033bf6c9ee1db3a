"""``llamahybrid check``, ``bench`` and ``hazards``: tests and measurements by the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llamahybrid.children import ended_in_order
from llamahybrid.cli.console import errors_shown
from llamahybrid.engine.process import Progress, display
from llamahybrid.files import require_writable, write_so_far

if TYPE_CHECKING:
    from llamahybrid.harness.report import Report, Verdict
    from llamahybrid.harness.targets.base import Target

Model = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="GGUF file")]
Models = Annotated[
    list[Path] | None,
    typer.Option(
        "--model",
        exists=True,
        dir_okay=False,
        help="GGUF file; repeatable; default: tiny models, made for the run",
    ),
]
_ON = (
    "target: stock, stock+ram, stock+disk, ours, class:FILE.py:NAME (each may have @LIB), server:PATH, or a "
    "URL; LABEL= before it names it; repeatable"
)
On = Annotated[list[str], typer.Option("--on", help=_ON)]
SomeOn = Annotated[
    list[str] | None,
    typer.Option("--on", help=_ON + "; default of check: ours, of bench: stock, stock+ram and ours"),
]
Lib = Annotated[Path | None, typer.Option(exists=True, help="libllama, or its folder, of targets in Python")]
Json = Annotated[Path | None, typer.Option("--json", help="write the report here")]
Layers = Annotated[int, typer.Option(help="layers on the GPU; -1: all")]

MINUTES = 5.0
"""Time for a check of given models, and of servers."""


def check(
    on: SomeOn = None,
    model: Models = None,
    lib: Lib = None,
    json: Json = None,
    workload: Annotated[list[str] | None, typer.Option(help="only this workload; repeatable")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="only the directed probes")] = False,
    hazards: Annotated[
        bool, typer.Option(help="also the hazards of the libllama of targets in Python")
    ] = False,
    server_option: Annotated[
        list[str] | None, typer.Option(help="argument for llama-server; repeatable")
    ] = None,
    n_gpu_layers: Layers = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="default: all idle cores for --model, one for tiny models")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="time for all of it: conversations are shortened to fit; 0: no limit; default: 5, "
            "for tiny models no limit",
        ),
    ] = None,
) -> None:
    """Run probes and workloads on each target; exit status 1 if a verdict is bad.

    Ctrl-C ends it with the report so far (exit status 130), and --json is written after each step.
    LLAMAHYBRID_TARGET_KEY: the API key of a URL.
    """
    from llamahybrid.harness.check import Check, models, workloads_called
    from llamahybrid.harness.targets import choice

    with running(json) as told:
        targets = choice.targets(on or ["ours"], lib, server_option or ())
        chosen = () if quick else workloads_called(workload or ())
        given = model or ()
        needed = bool(given) or any(each.needs_model for each in targets)
        with models(given, n_gpu_layers, make=needed, threads=threads) as files:
            if minutes is None and (model or not any(each.needs_model for each in targets)):
                minutes = MINUTES
            run = Check(targets, files, chosen, _hazards if hazards else lambda _: (), progress=told)
            run.found, run.minutes = so_far(json), minutes or None
            report = run.run()
    finish(report, json)


def bench(
    model: Model,
    on: SomeOn = None,
    lib: Lib = None,
    rounds: Annotated[int, typer.Option(min=1, help="times are medians of so many rounds")] = 3,
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="clients at once; repeatable; default: 1, 4, 8")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all idle cores")] = None,
    n_gpu_layers: Layers = 0,
    json: Json = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="time for all of it: conversations are shortened to fit; 0: no limit")
    ] = 5,
) -> None:
    """Measure tokens decoded over the least possible, time to first token, throughput, memory.

    Ctrl-C ends it with the results so far (exit status 130); --json is written after each part.
    """
    from llamahybrid.harness.bench import Bench
    from llamahybrid.harness.check import model_file
    from llamahybrid.harness.targets import choice

    with running(json) as told:
        file = model_file(model.name, model, n_gpu_layers, threads)
        targets = choice.targets(on or ("stock", "stock+ram", "ours"), lib)
        at_once = tuple(clients or (1, 4, 8))
        run = Bench(targets, [file], rounds, at_once, progress=told, minutes=minutes or None)
        run.found = so_far(json)
        report = run.run()
    finish(report, json)


def hazards(
    lib: Annotated[
        Path | None, typer.Option(exists=True, help="a libllama, or its folder; default: llama_cpp's")
    ] = None,
    arch: Annotated[str | None, typer.Option(help="run every probe on this architecture")] = None,
    probe: Annotated[list[str] | None, typer.Option(help="run only this probe; repeatable")] = None,
    json: Json = None,
    n_gpu_layers: Layers = 0,
    rpc: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="RPC servers that hold layers")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="probes at a time")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="seconds a probe may take")] = 60,
) -> None:
    """Find situations in which a libllama computes wrong logits or dies; exit status 1 if there are any.

    Each probe runs in a process of its own. Ctrl-C ends the run with the report so far (exit status 130).
    """
    from llamahybrid.harness.hazards import runner
    from llamahybrid.harness.hazards.catalogue import PROBES, find

    with running(json) as told:
        probes = [find(name) for name in probe or ()] or PROBES
        settings = {"gpu_layers": n_gpu_layers, "rpc": rpc, "jobs": jobs, "seconds": timeout}
        report = runner.report(probes, runner.library(lib), told, arch, **settings)
    finish(report, json)


@contextmanager
def running(json: Path | None) -> Iterator[Progress]:
    """Show progress and errors of a run that writes its report to `json` at its end."""
    with ended_in_order(), errors_shown(ValueError, OSError):
        if json is not None:
            require_writable(json)
        with display() as told:
            yield told


def so_far(json: Path | None) -> Callable[[Report], None]:
    """Return a function that writes the report of a run that goes on."""
    return lambda report: write_so_far(json, report.write) if json is not None else None


def finish(report: Report, json: Path | None) -> None:
    """Write and print a report; exit with 130 if it is not complete, 1 if a target is bad.

    An error of the file comes last: the results are printed first.
    """
    from llamahybrid.harness.render.terminal import show

    with errors_shown(OSError):
        try:
            if json is not None:
                report.write(json)
        finally:
            show(report, Console())
    if not report.complete:
        raise typer.Exit(130)
    if any(each.outcome == "bad" for each in report.targets):
        raise typer.Exit(1)


def _hazards(target: Target) -> tuple[Verdict, ...]:
    """Return the hazards of a target's libllama; servers have none here."""
    from llamahybrid.harness.hazards import runner
    from llamahybrid.harness.targets.local import LocalTarget

    return runner.verdicts(target.library) if isinstance(target, LocalTarget) and target.library else ()
