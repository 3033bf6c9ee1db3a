"""``llamahybrid hazards``: situations in which a libllama computes wrong logits or dies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamahybrid.children import ended_in_order
from llamahybrid.cli.check import Json, finish
from llamahybrid.cli.engine import errors_shown
from llamahybrid.cli.progress import progress
from llamahybrid.files import require_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamahybrid.harness.hazards.runner import Result


def hazards(
    lib: Annotated[Path | None, typer.Option(help="a libllama, or its folder; default: llama_cpp's")] = None,
    arch: Annotated[str | None, typer.Option(help="run every probe on this architecture")] = None,
    probe: Annotated[list[str] | None, typer.Option(help="run only this one; repeatable")] = None,
    json: Json = None,
    junit: Annotated[Path | None, typer.Option(help="write a JUnit report here")] = None,
    expect: Annotated[
        str | None, typer.Option(help="stock: fail where the pinned stock build differs")
    ] = None,
    n_gpu_layers: Annotated[int, typer.Option(help="layers on the GPU; -1: all")] = 0,
    rpc: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="RPC servers that hold layers")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="probes at a time")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="seconds a probe may take")] = 60,
) -> None:
    """Find situations in which a libllama computes wrong logits or dies; exit status 1 if there are any.

    Each probe runs in a process of its own. Ctrl-C ends the run with the report so far (exit status 130).
    """
    from llamahybrid.harness import hazard_verdicts as harness
    from llamahybrid.harness.hazards.catalogue import PROBES, find
    from llamahybrid.harness.hazards.runner import library

    if expect not in (None, "stock") or (expect and arch):
        raise typer.BadParameter("--expect is stock, without --arch: only that table is known")
    with ended_in_order(), errors_shown(ValueError, OSError):
        require_writable(json, junit)
        probes = [find(name) for name in probe or ()] or PROBES
        under_test = library(lib)
        with progress() as told:

            def done(results: Sequence[Result]) -> None:
                told(results[-1].probe.id, len(results) - 1, len(probes))

            settings = {"gpu_layers": n_gpu_layers, "rpc": rpc, "jobs": jobs, "seconds": timeout}
            report, results = harness.report(probes, under_test, done, arch=arch, **settings)
    if expect is None or not report.complete:
        finish(report, json, junit)
        return
    finish(report, json, junit, judge=False)
    typer.echo("\n".join(found := harness.surprises(results)) or "as known of stock llama-cpp-python 0.3.36")
    if found:
        raise typer.Exit(1)
