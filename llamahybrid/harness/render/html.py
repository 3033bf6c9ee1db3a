"""A report as one page of HTML without network and scripts, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamahybrid.errors import ReportError
from llamahybrid.harness.render import formatting
from llamahybrid.harness.render.bars import Bar, bar, labels
from llamahybrid.harness.render.dedupe import Alike, alike
from llamahybrid.harness.render.plots import Picture
from llamahybrid.harness.render.sentences import (
    HAZARD,
    Sentence,
    faults,
    headline,
    of_target,
    outcome,
    overall,
    sentence,
    tabled,
)
from llamahybrid.harness.report import (
    Outcome,
    Report,
    RequestFigures,
    TargetFigures,
    Times,
    Verdict,
    WorkloadFigures,
)

_HERE = Path(__file__).parent
_MOST_BARS = 60
"""Largest number of drawn requests of a workload."""


@dataclass(frozen=True)
class _Side:
    """A workload on one target."""

    target: str
    outcome: Outcome
    figures: WorkloadFigures
    plot: Picture | None
    """None: the target hides numbers of tokens."""
    misses: Sequence[Alike]
    said: Sequence[Sentence]
    more: int
    """Number of requests that are not drawn."""


@dataclass(frozen=True)
class _Section:
    """A workload on all targets."""

    name: str
    about: str
    sides: Sequence[_Side]
    first_tokens: Picture | None

    @property
    def bad(self) -> bool:
        """True if a target has a fault."""
        return any(side.outcome == "bad" for side in self.sides)


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
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    sections = [_section(report, name) for name in _names(report)]
    hazards = _hazard_plot(report)
    page: str = environment.get_template("page.html").render(
        report=report,
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        headline=headline(report),
        cards=[(target, outcome(target), of_target(target)) for target in report.targets],
        rows=_rows(report),
        sections=sections,
        hazards=hazards,
        hit=[(target.name, hit) for target in report.targets if (hit := _hit(target))],
        overall=overall,
        faults=faults,
        cells=formatting,
        times=_times(report),
    )
    return page


def _names(report: Report) -> list[str]:
    """Return the workloads in their order."""
    return list(dict.fromkeys(w.workload for target in report.targets for w in tabled(target)))


def _figures(target: TargetFigures) -> Mapping[str, WorkloadFigures]:
    return {w.workload: w for w in target.workloads}


def _rows(report: Report) -> list[tuple[str, list[WorkloadFigures | None]]]:
    """Return the table of all workloads, with a column for each target that ran one."""
    targets = [_figures(target) for target in report.targets if target.workloads]
    return [(name, [each.get(name) for each in targets]) for name in _names(report)]


def _section(report: Report, name: str) -> _Section:
    from llamahybrid.harness.render.plots import first_tokens

    found = [(t.name, figures) for t in report.targets if (figures := _figures(t).get(name)) is not None]
    every = [_bars(figures.requests) for _, figures in found]
    longest = max((each.length for bars in every for each in bars), default=0)
    sides = [
        _side(target, figures, bars, longest) for (target, figures), bars in zip(found, every, strict=True)
    ]
    series = {
        target: [request.ttft for request in figures.requests]
        for target, figures in found
        if any(request.ttft for request in figures.requests)
    }
    most = max((figures.requests for _, figures in found), key=len, default=())
    return _Section(name, _about(name), sides, first_tokens(series, labels(most)) if series else None)


def _side(target: str, figures: WorkloadFigures, bars: Sequence[Bar], longest: int) -> _Side:
    from llamahybrid.harness.render.plots import timeline

    requests, shown = figures.requests, bars[:_MOST_BARS]
    return _Side(
        target,
        overall(figures.verdicts),
        figures,
        timeline(shown, longest) if shown else None,
        alike(requests),
        [sentence(verdict) for verdict in figures.verdicts],
        len(bars) - len(shown),
    )


def _about(name: str) -> str:
    """Return the description of one of our workloads; empty for traces."""
    from llamahybrid.harness.check import WORKLOADS

    known = [each for each in WORKLOADS if f": {name}".endswith(f": {each.name}")]
    return (
        " ".join((max(known, key=lambda each: len(each.name)).start.__doc__ or "").split()) if known else ""
    )


def _times(report: Report) -> list[tuple[str, str, Times]]:
    """Return the measurements of `llamahybrid bench`, workload by workload."""
    found = [(w.workload, target.name, w.times) for target in report.targets for w in target.workloads]
    order = list(dict.fromkeys(name for name, _, _ in found))
    measured = [(name, target, times) for name, target, times in found if times is not None]
    return sorted(measured, key=lambda each: order.index(each[0]))


def _bars(requests: Sequence[RequestFigures]) -> list[Bar]:
    named = zip(requests, labels(requests), strict=True)
    return [made for request, label in named if (made := bar(request, label)) is not None]


def _hazard_plot(report: Report) -> Picture | None:
    from llamahybrid.harness.render.plots import hazards

    counts = {t.name: Counter[str](v.outcome for v in t.hazards) for t in report.targets if t.hazards}
    return hazards(counts) if counts else None


def _hit(target: TargetFigures) -> list[tuple[str, Verdict]]:
    return [(v.name.removeprefix(HAZARD), v) for v in target.hazards if v.outcome == "bad"]
