"""What the engine of this run is known to do in every probe of the catalogue, on every model it knows.

Stock is compared by verdict; the patched build (`LLAMAHYBRID_TEST_LIB`, as in tests/patches) to the letter of
its detail too: positions, return values and statuses.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from llamahybrid.engine.activation import stock
from llamahybrid.hazards import runner
from llamahybrid.hazards.catalogue import PROBES
from llamahybrid.hazards.probe import Model, Outcome, Probe, Verdict
from llamahybrid.hazards.runner import Result

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all children

PATCHED = os.environ.get("LLAMAHYBRID_TEST_LIB", "")
CASES = [(probe, model) for probe in PROBES for model in probe.known]


def surprise(result: Result, patched: bool) -> str | None:
    """What is other than known, None when nothing is."""
    probe, outcome = result.probe, result.outcome
    known = probe.mended(result.model) if patched else (probe.known[result.model], outcome.detail)
    found = outcome.verdict, outcome.detail
    return None if found == known else f"{found}, known is {known}"


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, Model], Result]:
    """Every case's result with the library of this run."""
    library = runner.library(Path(PATCHED) if PATCHED else stock())
    return {
        (each.probe.id, each.model): each for each in runner.run(PROBES, library, known=True, seconds=240)
    }


@pytest.mark.parametrize(
    ("probe", "model"), CASES, ids=[f"{probe.id}-{model.name}" for probe, model in CASES]
)
def test_it_does_what_is_known_of_it(
    results: dict[tuple[str, Model], Result], probe: Probe, model: Model
) -> None:
    assert surprise(results[probe.id, model], bool(PATCHED)) is None


def test_a_wrong_verdict_says_how_wrong(results: dict[tuple[str, Model], Result]) -> None:
    for result in results.values():
        if result.outcome.verdict is Verdict.DIED:
            assert result.outcome.detail.startswith(("SIGABRT", "SIGSEGV"))


def test_another_verdict_or_detail_is_a_surprise() -> None:
    for probe, model in CASES:
        mended, says = probe.mended(model)
        good = Result(probe, model, Outcome(mended, says), 0.0)
        assert surprise(good, patched=True) is None
        for verdict in set(Verdict) - {mended}:
            assert surprise(replace(good, outcome=Outcome(verdict, says)), patched=True)
        assert surprise(replace(good, outcome=Outcome(mended, f"{says} 1")), patched=True)
        for verdict in Verdict:
            found = surprise(replace(good, outcome=Outcome(verdict)), patched=False)
            assert (found is None) == (verdict is probe.known[model])


def test_what_stock_does_wrong_names_its_patch_and_is_mended() -> None:
    series = {path.name[:4] for path in (Path(__file__).parents[2] / "patches").glob("*.patch")}
    for probe in PROBES:
        assert set(probe.patches) <= series
        for model in probe.known:
            verdict, says = probe.mended(model)
            assert verdict in (Verdict.EXACT, Verdict.REFUSED)
            assert says
        assert set(probe.otherwise) <= set(probe.also)
        if not all(verdict.sound for verdict in probe.known.values()):
            assert probe.patches, probe.id


def test_stock_is_far_from_sound() -> None:
    verdicts = [probe.stock for probe in PROBES]
    assert verdicts.count(Verdict.WRONG) >= 15
    assert verdicts.count(Verdict.DIED) >= 8
    assert {number for probe in PROBES for number in probe.patches} >= {
        f"{n:04}" for n in (*range(1, 14), 15, 17, 18, 20, 25, 26, 27, 28)
    }
