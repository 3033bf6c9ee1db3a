"""A report as Markdown for a pull request: sentences, a table for each target, and folded misses."""

from __future__ import annotations

from collections.abc import Iterator

from llamahybrid.harness.render.formatting import answers, counted, length, ratio
from llamahybrid.harness.render.sentences import (
    HAZARD,
    headline,
    of_target,
    outcome,
    overall,
    sentence,
    tabled,
)
from llamahybrid.harness.report import Outcome, Report, TargetFigures, place

_MARKS: dict[Outcome, str] = {"ok": "✅", "bad": "❌", "cannot tell": "❔"}
_SPECIAL = frozenset("\\`*_{}[]<>()#+!|~$&-")
_MOST_MISSES = 3
"""Largest number of misses of a workload."""


def markdown(report: Report) -> str:
    """Return the document."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"## Prefix reuse: {escaped(headline(report))}"
    for target in report.targets:
        yield ""
        yield f"### {_MARKS[outcome(target)]} {escaped(target.name)}"
        yield ""
        yield from (f"- {_MARKS[said.outcome]} {escaped(said.text)}" for said in of_target(target))
        if tabled(target):
            yield ""
            yield from _table(target)
        yield from _misses(target)
        yield from _hazards(target)
    yield ""
    said = (*report.machine.items(), ("models", ", ".join(report.models)), ("run", report.made))
    yield f"<sub>{escaped('; '.join(f'{name}: {value}' for name, value in said))}</sub>"


def _table(target: TargetFigures) -> Iterator[str]:
    yield "| | workload | requests | had to be decoded | decoded | ratio | answers |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for w in tabled(target):
        mark = _MARKS[overall(w.verdicts)]
        numbers = f"{len(w.requests)} | {counted(w.least)} | {counted(w.decoded)} | {ratio(w.ratio)}"
        yield f"| {mark} | {escaped(w.workload + length(w.scale))} | {numbers} | {answers(w.requests)} |"


def _misses(target: TargetFigures) -> Iterator[str]:
    lines: list[str] = []
    every = 0
    for w in tabled(target):
        missed = [request for request in w.requests if request.miss is not None]
        every += len(missed)
        shown = missed if len(missed) <= _MOST_MISSES else missed[: _MOST_MISSES - 1]
        lines += [f"- {escaped(f'{w.workload}, {place(r)}: {r.miss}')}" for r in shown]
        if len(missed) > len(shown):
            lines.append(f"- {escaped(w.workload)}: and {len(missed) - len(shown)} more, in the JSON report")
    yield from _folded(f"Why tokens were not reused ({every})", lines)


def _hazards(target: TargetFigures) -> Iterator[str]:
    hit = [verdict for verdict in target.hazards if verdict.outcome == "bad"]
    lines = [f"- `{v.name.removeprefix(HAZARD)}`: {escaped(v.detail or sentence(v).text)}" for v in hit]
    yield from _folded(
        f"Hazards of the native memory that hit it ({len(hit)} of {len(target.hazards)})", lines
    )


def _folded(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"<details><summary>{title}</summary>", "", *lines, "", "</details>")


def escaped(text: str) -> str:
    """Return `text` in one line, without markup and mentions."""
    plain = "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in " ".join(text.split()))
    return plain.replace("@", "@<!-- -->")
