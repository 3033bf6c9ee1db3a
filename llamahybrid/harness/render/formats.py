"""A report as a page of HTML (no network, no scripts), as Markdown, and as JUnit XML for CI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamahybrid.files import printable
from llamahybrid.harness.render.document import (
    TEXTS,
    Finding,
    described,
    footer,
    headline,
    misses,
    ratio,
    sections,
    tabled,
)
from llamahybrid.harness.report import HAZARD, Report, RequestFigures, TargetFigures, Verdict, place

_SPECIAL = frozenset("\\`*_{}[]<>()#+!|~$&-")


def html(report: Report) -> str:
    """Return the page."""
    names = dict.fromkeys(w.workload for target in report.targets for w in tabled(target))
    workloads = [_workload(report, name) for name in names]
    return _rendered("page.html", report, _in_line, workloads=workloads)


def markdown(report: Report) -> str:
    """Return Markdown for a pull request."""
    return _rendered("report.md", report, _escaped)


def junit(report: Report) -> str:
    """Return JUnit XML, with a suite for each target and a case for each verdict, named as in every run.

    "bad" is a failure, "cannot tell" is skipped; a target that did not run to its end has an error.
    """
    return _rendered("junit.xml", report, _in_line, suites=[(t, _cases(t)) for t in report.targets])


def _rendered(name: str, report: Report, shown: Callable[[Any], Any], **more: Any) -> str:
    """Render a template, to which `shown` gives each value."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=not name.endswith(".md"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
    known = {"report": report, "headline": headline(report), "footer": footer(report), "texts": TEXTS}
    page: str = environment.get_template(name).render(sections=sections(report), **known, **more)
    return page.rstrip("\n") + "\n"


def _in_line(value: Any) -> Any:
    """Replace control characters in texts, but not in markup."""
    return printable(value) if type(value) is str else value


def _escaped(value: Any) -> Any:
    """Return a text in one line, without markup and mentions."""
    if not isinstance(value, str):
        return value
    plain = "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in " ".join(value.split()))
    return plain.replace("@", "@<!-- -->")


def _cases(target: TargetFigures) -> list[tuple[str, str, float, str, str]]:
    """Return class, name, seconds, kind of failure (empty: none) and message of each test case."""
    cases = [(target.name, "runs", 0.0, "" if target.error is None else "error", target.error or "")]
    for w in target.workloads:
        seconds = sum(request.seconds for request in w.requests) / max(1, len(w.verdicts))
        cases += [_case(f"{target.name}.{w.workload}", verdict, seconds) for verdict in w.verdicts]
    return cases + [_case(f"{target.name}.hazards", verdict, 0.0) for verdict in target.hazards]


def _case(where: str, verdict: Verdict, seconds: float) -> tuple[str, str, float, str, str]:
    kind = {"ok": "", "bad": "failure", "cannot tell": "skipped"}[verdict.outcome]
    return where, verdict.name.removeprefix(HAZARD), seconds, kind, described(verdict)


def _workload(report: Report, name: str) -> dict[str, Any]:
    """Return a workload on all targets, turn by turn."""
    found = {t.name: w for t in report.targets for w in t.workloads if w.workload == name}
    turns = {target: [(place(r), parts(r), r.ttft) for r in w.requests] for target, w in found.items()}
    longest = max((sum(tokens) for each in turns.values() for _, tokens, _ in each if tokens), default=1)
    sides = [
        {
            "target": target,
            "outcome": w.outcome,
            "about": f"{ratio(w.ratio)} times the least tokens decoded",
            "turns": turns[target],
            "findings": [Finding(verdict.outcome, described(verdict)) for verdict in w.verdicts],
            "misses": misses(w.requests),
        }
        for target, w in found.items()
    ]
    return {"name": name, "about": _about(name), "sides": sides, "longest": max(1, longest)}


def parts(request: RequestFigures) -> tuple[int, int, int] | None:
    """Return the tokens of a request that were reused, decoded again though known, and had to be decoded.

    None: the target hides reused and decoded tokens.
    """
    total, cached, decoded = request.total, request.cached, request.decoded
    if total is None or (cached is None and decoded is None):
        return None
    reused = max(0, total - (decoded or 0)) if cached is None else cached
    decoded = max(0, total - reused) if decoded is None else decoded
    # The last token of a known prompt is decoded for its logits.
    known = min(request.matched or 0, total - 1)
    again = min(decoded, max(0, known - reused))
    return reused, again, decoded - again


def _about(name: str) -> str:
    """Return the description of one of our workloads; empty for traces."""
    from llamahybrid.harness.check import WORKLOADS

    known = [each for each in WORKLOADS if f": {name}".endswith(f": {each.name}")]
    longest = max(known, key=lambda each: len(each.name), default=None)
    return "" if longest is None else " ".join((longest.start.__doc__ or "").split())
