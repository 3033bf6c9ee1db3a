"""Verdicts on gaps and statuses."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from llamahybrid.harness.hazards.outcome import (
    Gap,
    NotApplicable,
    Outcome,
    Verdict,
    all_sound,
    gap,
    refused,
    went_on,
    wrong,
)

NONE, FAR, LOST = Gap(0.0, 10.0), Gap(1.0, 10.0), Gap(math.inf, 10.0)


@pytest.mark.parametrize(
    ("gap", "outcome"),
    [
        (NONE, Outcome(Verdict.EXACT, "yes", 0.0)),
        (FAR, Outcome(Verdict.WRONG, "yes", 1.0)),
        (LOST, Outcome(Verdict.WRONG, "yes; logits are not finite")),
        (-1, Outcome(Verdict.REFUSED, "yes; the next decode returned -1")),
    ],
)
def test_accepted_call_is_exact_wrong_or_refused(gap: Gap | int, outcome: Outcome) -> None:
    assert went_on(gap, "yes") == outcome


@pytest.mark.parametrize(
    ("gap", "outcome"),
    [
        (NONE, Outcome(Verdict.REFUSED, "no", 0.0)),
        (FAR, Outcome(Verdict.WRONG, "no, but the live state was damaged", 1.0)),
        (LOST, Outcome(Verdict.WRONG, "no, but the live state was damaged")),
        (1, Outcome(Verdict.REFUSED, "no; the live state was lost, the next decode returned 1")),
    ],
)
def test_refused_call_keeps_or_drops_the_live_state(gap: Gap | int, outcome: Outcome) -> None:
    assert refused(gap, "no") == outcome


def test_first_unsound_outcome_ends_the_probe() -> None:
    def tried() -> Iterator[Outcome]:
        yield Outcome(Verdict.EXACT)
        yield wrong("bad")
        raise AssertionError("nothing is done after it")

    assert all_sound(tried()) == wrong("bad")
    with pytest.raises(ValueError, match="nothing was tried"):
        all_sound([])


def test_last_sound_outcome_has_the_largest_difference() -> None:
    before = [Outcome(Verdict.EXACT, "a", 0.2), Outcome(Verdict.EXACT, "b", 0.1)]
    assert all_sound([*before, Outcome(Verdict.REFUSED, "c")]) == Outcome(Verdict.REFUSED, "c", 0.2)
    assert all_sound([*before, Outcome(Verdict.EXACT, "c", 0.0)]) == Outcome(Verdict.EXACT, "c", 0.0)
    assert all_sound([Outcome(Verdict.REFUSED, "c")]).difference is None


def test_gap_is_relative_to_the_range_of_a_clean_row() -> None:
    row = np.array([0, 100], np.float32)
    assert gap(row + np.float32(0.005), row).exact
    assert not gap(row + np.float32(0.05), row).exact
    assert gap(row + np.float32(0.5), row, share=1e-2).exact, "a GPU's"
    lost = gap(np.array([0, np.nan], np.float32), row)
    assert (lost.exact, lost.reported) == (False, None)
    with pytest.raises(NotApplicable):
        gap(row, np.ones(2, np.float32))


def test_dying_and_wrong_verdicts_are_not_sound() -> None:
    assert not any(v.sound for v in (Verdict.DIED, Verdict.WRONG, Verdict.FAILED))
