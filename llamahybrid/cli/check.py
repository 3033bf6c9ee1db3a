"""``llamahybrid check``: tests of prefix reuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llamahybrid.children import ended_in_order
from llamahybrid.cli.console import errors_shown, progress
from llamahybrid.files import require_writable, write_so_far

if TYPE_CHECKING:
    from llamahybrid.harness.report import Report, Verdict
    from llamahybrid.harness.targets.base import Target

On = Annotated[
    list[str],
    typer.Option(
        "--on",
        help="stock, stock+ram, stock+disk, ours, class:FILE.py:NAME (each may have @LIB), server:PATH, "
        "or a URL; LABEL= before it names it; repeatable; check's default: ours",
    ),
]
Lib = Annotated[Path | None, typer.Option(help="a libllama, or its folder, for those that are Python")]
Json = Annotated[Path | None, typer.Option("--json", help="write the report here")]
Models = Annotated[
    list[Path] | None,
    typer.Option(
        "--model", exists=True, dir_okay=False, help="GGUF file; repeatable; default: tiny ones it makes"
    ),
]


MINUTES = 5.0
"""Time for a check of models that are given, and of servers."""


def check(
    on: On | None = None,
    model: Models = None,
    lib: Lib = None,
    json: Json = None,
    workload: Annotated[list[str] | None, typer.Option(help="only this one; repeatable")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="the directed probes alone")] = False,
    hazards: Annotated[bool, typer.Option(help="libllama's hazards, too, where there is one")] = False,
    server_option: Annotated[
        list[str] | None, typer.Option(help="argument for llama-server; repeatable")
    ] = None,
    n_gpu_layers: Annotated[int, typer.Option(help="layers on the GPU; -1: all")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="default: all cores for --model, one for tiny models")
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

    with ended_in_order(), errors_shown(ValueError, OSError):
        require_writable(json)
        targets = choice.targets(on or ["ours"], lib, server_option or ())
        chosen = () if quick else workloads_called(workload or ())
        given = model or ()
        needed = bool(given) or any(each.needs_model for each in targets)
        with models(given, n_gpu_layers, make=needed, threads=threads) as files, progress() as told:
            found = _hazards(lib) if hazards else (lambda _: ())
            if minutes is None and (model or not any(each.needs_model for each in targets)):
                minutes = MINUTES
            run = Check(targets, files, chosen, found, told, minutes or None)
            if json is not None:
                run.found = lambda so_far: write_so_far(json, so_far.write)
            report = run.run()
    finish(report, json)


def _hazards(lib: Path | None) -> Callable[[Target], tuple[Verdict, ...]]:
    """Return a function for the hazards of a target's libllama; servers have none here."""
    from llamahybrid.harness.hazard_verdicts import verdicts
    from llamahybrid.harness.targets.local import LocalTarget

    return lambda each: verdicts(each.library) if isinstance(each, LocalTarget) and each.library else ()


def finish(report: Report, json: Path | None, junit: Path | None = None, judge: bool = True) -> None:
    """Print and write a report; exit with 130 if it is not complete, 1 if `judge` and a target is bad."""
    from llamahybrid.files import without_home
    from llamahybrid.harness.render import junit as xml
    from llamahybrid.harness.render.sentences import outcome
    from llamahybrid.harness.render.terminal import show

    unwritten: OSError | None = None
    try:
        if json is not None:
            report.write(json)
        if junit is not None:
            junit.write_text(without_home(xml.junit(report)), encoding="utf-8")
    except OSError as error:
        unwritten = error
    show(report, Console())
    with errors_shown(OSError):
        if unwritten is not None:  # raised last, so that the results are shown
            raise unwritten
    if not report.complete:
        raise typer.Exit(130)
    if judge and any(outcome(each) == "bad" for each in report.targets):
        raise typer.Exit(1)
