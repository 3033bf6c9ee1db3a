"""What the engine of this run is known to do in each probe, on every model that the probe knows.

Stock is compared by verdict; the patched build (`LLAMAHYBRID_TEST_LIB`, as in tests/patches) to the letter of
its detail too: positions, return values and statuses. Where the library lacks a patch that mends a probe,
something else must come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

import pytest

from llamahybrid.harness.hazards.case import Model, Probe
from llamahybrid.harness.hazards.outcome import Verdict
from llamahybrid.harness.hazards.runner import Result
from tests.lab import patched_library
from tests.lab.patched_library import marks

Results: TypeAlias = Mapping[tuple[str, Model], Result]
PATCHED = bool(patched_library.PATCHED)


def surprise(result: Result, patched: bool) -> str | None:
    """What is other than known, None when nothing is."""
    probe, outcome = result.probe, result.outcome
    if outcome.verdict is Verdict.DIED and not outcome.detail.startswith(("SIGABRT", "SIGSEGV")):
        return f"an end of another kind: {outcome.detail}"
    known = probe.mended(result.model) if patched else (probe.known[result.model], outcome.detail)
    found = outcome.verdict, outcome.detail
    return None if found == known else f"{found}, known is {known}"


def known_of(probes: Iterable[Probe]) -> Callable[..., None]:
    """A test of each of a family's probes, on each model that it knows."""
    cases = [
        pytest.param(probe, model, id=f"{probe.id}-{model.name}", marks=_marks(probe))
        for probe in probes
        for model in probe.known
    ]

    @pytest.mark.xdist_group("hazards")  # one worker runs all probes, at the first of these tests
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize(("probe", "model"), cases)
    def test(results: Results, probe: Probe, model: Model) -> None:
        assert surprise(results[probe.id, model], PATCHED) is None

    return test


def _marks(probe: Probe) -> Collection[pytest.MarkDecorator]:
    """On stock only the full suite runs it: what stock does is known, and no change of ours alters it."""
    if PATCHED:
        return [pytest.mark.patched, *marks(probe.patches)]
    return [pytest.mark.patched, pytest.mark.full]
