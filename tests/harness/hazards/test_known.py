"""Each probe on each of its models: the known verdict of the engine of this run.

Stock is compared by verdict; the patched build (`LLAMAHYBRID_TEST_LIB`, as in tests/patches) by the exact
detail, too: positions, return values and statuses. A library that lacks a patch must give another effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

from llamahybrid.engine.bindings import stock
from llamahybrid.harness.hazards.case import Known, Probe
from llamahybrid.harness.hazards.catalogue import PROBES
from llamahybrid.harness.hazards.effect import Behaviour
from llamahybrid.harness.hazards.runner import Result, library, run
from tests.lab import patched_library
from tests.lab.patched_library import marks

PATCHED = bool(patched_library.PATCHED)
Results: TypeAlias = Mapping[tuple[str, str], Result]


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    """Results of the selected tests' probes on all their models, with this run's library."""
    asked = {
        item.callspec.params["probe"].id
        for item in request.session.items
        if hasattr(item, "callspec") and "results" in getattr(item, "fixturenames", ())
    }
    under_test = library(Path(patched_library.PATCHED) if PATCHED else stock())
    cases = [(probe, model) for probe in PROBES if probe.id in asked for model in probe.known]
    found = run(cases, under_test, seconds=240)
    return {(each.probe.id, each.model): each for each in found}


def surprise(result: Result, patched: bool) -> str | None:
    """Describe an effect other than the known one; None: it is the known one."""
    probe, effect = result.probe, result.effect
    if effect.behaviour is Behaviour.DIED and not effect.detail.startswith(("SIGABRT", "SIGSEGV")):
        return f"an end of another kind: {effect.detail}"
    given = probe.known[result.model]
    known = (given.patched, given.says) if patched else (given.stock, effect.detail)
    found = effect.behaviour, effect.detail
    return None if found == known else f"{found}, known is {known}"


def _marks(known: Known) -> Collection[pytest.MarkDecorator]:
    """On stock only the full suite runs it: our changes do not alter stock."""
    if PATCHED:
        return [pytest.mark.patched, *marks(known.patches)]
    return [pytest.mark.patched, pytest.mark.full]


@pytest.mark.xdist_group("hazards")  # one worker runs all probes, at the first of these tests
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("probe", "model"),
    [
        pytest.param(probe, model, id=f"{probe.id}-{model}", marks=_marks(known))
        for probe in PROBES
        for model, known in probe.known.items()
    ],
)
def test_probe_has_its_known_outcome(results: Results, probe: Probe, model: str) -> None:
    assert surprise(results[probe.id, model], PATCHED) is None
