"""A report as one page of HTML without network and scripts, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamahybrid.errors import ReportError
from llamahybrid.harness.render.document import TEXTS, footer, misses, ratio, sections
from llamahybrid.harness.render.sentences import headline, overall, sentence, tabled
from llamahybrid.harness.report import Report


def html(report: Report) -> str:
    """Return the page.

    Raises:
        ReportError: matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401 -- an early error
    except ImportError as error:
        raise ReportError(f"the HTML page: {error}; install llamahybrid[report]") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = dict.fromkeys(w.workload for target in report.targets for w in tabled(target))
    page: str = environment.get_template("page.html").render(
        headline=headline(report),
        sections=sections(report),
        workloads=[_workload(report, name) for name in names],
        footer=footer(report),
        texts=TEXTS,
    )
    return page


def _workload(report: Report, name: str) -> dict[str, Any]:
    """Return a workload on all targets as the page shows it."""
    from llamahybrid.harness.render.plots import first_tokens, timeline

    found = {t.name: w for t in report.targets for w in t.workloads if w.workload == name}
    every = [w.requests for w in found.values()]
    sides = [
        {
            "target": target,
            "outcome": overall(w.verdicts),
            "about": f"{ratio(w.ratio)} times the least tokens decoded",
            "plot": timeline(w.requests, every),
            "sentences": [sentence(verdict) for verdict in w.verdicts],
            "misses": misses(w.requests),
        }
        for target, w in found.items()
    ]
    return {"name": name, "about": _about(name), "sides": sides, "first_tokens": first_tokens(found)}


def _about(name: str) -> str:
    """Return the description of one of our workloads; empty for traces."""
    from llamahybrid.harness.check import WORKLOADS

    known = [each for each in WORKLOADS if f": {name}".endswith(f": {each.name}")]
    longest = max(known, key=lambda each: len(each.name), default=None)
    return "" if longest is None else " ".join((longest.start.__doc__ or "").split())
