"""`llamahybrid report` and `compare`: JSON reports of the harness, for people and for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamahybrid.cli.console import errors_shown


def report(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a JSON report")],
    html: Annotated[Path | None, typer.Option(help="write one page here")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write Markdown here, for a pull request")] = None,
    junit: Annotated[Path | None, typer.Option(help="write JUnit XML here, for CI")] = None,
) -> None:
    """Show a JSON report of the harness; with options, write it as HTML, Markdown or JUnit instead."""
    from rich.console import Console

    from llamahybrid.harness.render import formats, terminal
    from llamahybrid.harness.report import Report

    with errors_shown(ValueError, OSError):
        found = Report.read(file)
        for out, render in ((html, formats.html), (markdown, formats.markdown), (junit, formats.junit)):
            if out is not None:
                out.write_text(render(found), encoding="utf-8")
                typer.echo(out)
    if not (html or markdown or junit):
        terminal.show(found, Console())


def compare(
    old: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="the JSON report of before")],
    new: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="the one of now")],
    strict: Annotated[bool, typer.Option(help="results that NEW lacks are worse, not only noted")] = False,
) -> None:
    """Show verdicts and counts of tokens that got better or worse; exit status 1 where something got worse.

    Times are not compared, because load differs from run to run: run `bench` on both builds instead.
    """
    from rich.console import Console

    from llamahybrid.harness.render.terminal import show_changes
    from llamahybrid.harness.report import Report
    from llamahybrid.harness.report_diff import changes

    with errors_shown(ValueError, OSError):
        found = changes(Report.read(old), Report.read(new), strict=strict)
    show_changes(found, Console())
    if any(each.kind == "worse" for each in found):
        raise typer.Exit(1)
