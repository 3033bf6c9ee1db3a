"""What the engine of this run is known to do in each probe, on every model that the probe knows.

Stock is compared by verdict; the patched build (`LLAMAHYBRID_TEST_LIB`, as in tests/patches) to the letter of
its detail too: positions, return values and statuses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import pytest

from llamahybrid.hazards.outcome import Verdict
from llamahybrid.hazards.probe import Model, Probe
from llamahybrid.hazards.runner import Result

Results: TypeAlias = Mapping[tuple[str, Model], Result]
PATCHED = bool(os.environ.get("LLAMAHYBRID_TEST_LIB", ""))


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
    cases = [(probe, model) for probe in probes for model in probe.known]

    @pytest.mark.native
    @pytest.mark.timeout(1800)  # the first test waits for all children
    @pytest.mark.parametrize(
        ("probe", "model"), cases, ids=[f"{probe.id}-{model.name}" for probe, model in cases]
    )
    def test(results: Results, probe: Probe, model: Model) -> None:
        assert surprise(results[probe.id, model], PATCHED) is None

    return test
