"""`llamahybrid compare`: whether a newer report is worse than an older one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamahybrid.cli.console import errors_shown


def compare(
    old: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="the JSON report of before")],
    new: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="the one of now")],
    strict: Annotated[bool, typer.Option(help="what NEW leaves out is worse, not only said")] = False,
) -> None:
    """Say what got better or worse beyond noise; exit status 1 where something got worse.

    Verdicts and counts of tokens are exact. Times count only beside another target that did not change, over
    eight workloads or more.
    """
    from rich.console import Console

    from llamahybrid.harness.render.terminal import show_changes
    from llamahybrid.harness.report import Report
    from llamahybrid.harness.report_diff import changes

    with errors_shown(ValueError, OSError):
        found = changes(Report.read(old), Report.read(new), strict=strict)
    show_changes(found, Console())
    if found.regressed:
        raise typer.Exit(1)
