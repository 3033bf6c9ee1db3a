"""The hazards of a libllama as verdicts of a report."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llamahybrid.harness.hazards.catalogue import PROBES
from llamahybrid.harness.hazards.outcome import Verdict as Found
from llamahybrid.harness.hazards.runner import expected, library, run
from llamahybrid.harness.report import Verdict


@cache
def verdicts(path: str) -> tuple[Verdict, ...]:
    """One a probe, named "hazard:<probe>". Raises EngineError where the library cannot be loaded."""
    under_test = library(Path(path) if path else None)
    found = []
    for result in run(PROBES, under_test):
        verdict = result.outcome.verdict
        lacking = expected(result, under_test.patches)
        unknown = lacking or verdict in (Found.NOT_APPLICABLE, Found.FAILED)
        detail = f"{result.probe.title}: {verdict.value}{'; cured by --hardening' * lacking}"
        outcome = "cannot tell" if unknown else "ok" if verdict.sound else "bad"
        found.append(Verdict(f"hazard:{result.probe.id}", outcome, detail))  # type: ignore[arg-type]
    return tuple(found)
