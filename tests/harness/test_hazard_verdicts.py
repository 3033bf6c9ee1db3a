"""Hazards of a libllama as verdicts of a report; the outcomes are made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamahybrid.harness import hazard_verdicts
from llamahybrid.harness.hazard_verdicts import verdicts
from llamahybrid.harness.hazards.catalogue import PROBES
from llamahybrid.harness.hazards.outcome import Outcome
from llamahybrid.harness.hazards.outcome import Verdict as Found
from llamahybrid.harness.hazards.runner import Library, Result

OUTCOMES = {
    Found.EXACT: "ok",
    Found.REFUSED: "ok",
    Found.WRONG: "bad",
    Found.DIED: "bad",
    Found.NOT_APPLICABLE: "cannot tell",
    Found.FAILED: "cannot tell",
}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path | None]]:
    """The libraries that were loaded; probe number n finds verdict number n."""
    paths: list[Path | None] = []

    def run(probes: object, under_test: object) -> list[Result]:
        assert probes is PROBES
        return [
            Result(probe, probe.model, Outcome(found), 0.0)
            for probe, found in zip(PROBES, Found, strict=False)
        ]

    def library(path: Path | None) -> Library:
        paths.append(path)
        return Library("x", "", {})

    monkeypatch.setattr(hazard_verdicts, "library", library)
    monkeypatch.setattr(hazard_verdicts, "run", run)
    verdicts.cache_clear()
    yield paths
    verdicts.cache_clear()


@pytest.mark.usefixtures("loaded")
def test_each_hazard_has_a_verdict() -> None:
    found = verdicts("x")
    assert [each.outcome for each in found] == [OUTCOMES[each] for each in Found]
    for verdict, probe, what in zip(found, PROBES, Found, strict=False):
        assert verdict.name == f"hazard:{probe.id}"
        assert verdict.detail == f"{probe.title}: {what.value}"
