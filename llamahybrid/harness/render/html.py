"""A report as one page of HTML without network and scripts, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamahybrid.errors import ReportError
from llamahybrid.harness.render.document import TEXTS, footer, misses, ratio, sections
from llamahybrid.harness.render.sentences import Sentence, headline, overall, sentence, tabled
from llamahybrid.harness.report import Outcome, Report, WorkloadFigures

if TYPE_CHECKING:
    from llamahybrid.harness.render.plots import Picture


@dataclass(frozen=True)
class _Side:
    """A workload on one target."""

    target: str
    outcome: Outcome
    about: str
    plot: Picture | None
    """None: the target hides numbers of tokens."""
    sentences: Sequence[Sentence]
    misses: Sequence[str]


@dataclass(frozen=True)
class _Workload:
    """A workload on all targets."""

    name: str
    about: str
    sides: Sequence[_Side]
    first_tokens: Picture | None


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


def _workload(report: Report, name: str) -> _Workload:
    from llamahybrid.harness.render.plots import first_tokens

    found = {t.name: w for t in report.targets for w in t.workloads if w.workload == name}
    return _Workload(name, _about(name), [_side(*each, found) for each in found.items()], first_tokens(found))


def _side(target: str, figures: WorkloadFigures, every: Mapping[str, WorkloadFigures]) -> _Side:
    from llamahybrid.harness.render.plots import timeline

    return _Side(
        target,
        overall(figures.verdicts),
        f"{ratio(figures.ratio)} times the least tokens decoded",
        timeline(figures.requests, [w.requests for w in every.values()]),
        [sentence(verdict) for verdict in figures.verdicts],
        misses(figures.requests),
    )


def _about(name: str) -> str:
    """Return the description of one of our workloads; empty for traces."""
    from llamahybrid.harness.check import WORKLOADS

    known = [each for each in WORKLOADS if f": {name}".endswith(f": {each.name}")]
    longest = max(known, key=lambda each: len(each.name), default=None)
    return "" if longest is None else " ".join((longest.start.__doc__ or "").split())
