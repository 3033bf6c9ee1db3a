"""`llamahybrid report`: what a run of the harness found, for people and for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamahybrid.cli.console import errors_shown


def report(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a JSON report")],
    html: Annotated[Path | None, typer.Option(help="write one page with plots here")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write Markdown here, for a pull request")] = None,
    junit: Annotated[Path | None, typer.Option(help="write JUnit XML here, for CI")] = None,
) -> None:
    """Show a JSON report of the harness; with options, write it as HTML, Markdown or JUnit instead."""
    from rich.console import Console

    from llamahybrid.harness.render import html as page
    from llamahybrid.harness.render import junit as xml
    from llamahybrid.harness.render import markdown as text
    from llamahybrid.harness.render import terminal
    from llamahybrid.harness.report import Report

    with errors_shown(ValueError, OSError):
        found = Report.read(file)
        for out, render in ((html, page.html), (markdown, text.markdown), (junit, xml.junit)):
            if out is not None:
                out.write_text(render(found), encoding="utf-8")
                typer.echo(out)
    if not (html or markdown or junit):
        terminal.show(found, Console())
