"""Verdicts on gaps and statuses."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from llamahybrid.harness.hazards.effect import (
    Behaviour,
    Effect,
    Gap,
    NotApplicable,
    all_sound,
    gap,
    refused,
    went_on,
    wrong,
)

NONE, FAR, LOST = Gap(0.0, 10.0), Gap(1.0, 10.0), Gap(math.inf, 10.0)


@pytest.mark.parametrize(
    ("gap", "effect"),
    [
        (NONE, Effect(Behaviour.EXACT, "yes", 0.0)),
        (FAR, Effect(Behaviour.WRONG, "yes", 1.0)),
        (LOST, Effect(Behaviour.WRONG, "yes; logits are not finite")),
        (-1, Effect(Behaviour.REFUSED, "yes; the next decode returned -1")),
    ],
)
def test_accepted_call_is_exact_wrong_or_refused(gap: Gap | int, effect: Effect) -> None:
    assert went_on(gap, "yes") == effect


@pytest.mark.parametrize(
    ("gap", "effect"),
    [
        (NONE, Effect(Behaviour.REFUSED, "no", 0.0)),
        (FAR, Effect(Behaviour.WRONG, "no, but the live state was damaged", 1.0)),
        (LOST, Effect(Behaviour.WRONG, "no, but the live state was damaged")),
        (1, Effect(Behaviour.REFUSED, "no; the live state was lost, the next decode returned 1")),
    ],
)
def test_refused_call_keeps_or_drops_the_live_state(gap: Gap | int, effect: Effect) -> None:
    assert refused(gap, "no") == effect


def test_first_unsound_outcome_ends_the_probe() -> None:
    def tried() -> Iterator[Effect]:
        yield Effect(Behaviour.EXACT)
        yield wrong("bad")
        raise AssertionError("nothing is done after it")

    assert all_sound(tried()) == wrong("bad")
    with pytest.raises(ValueError, match="nothing was tried"):
        all_sound([])


def test_last_sound_outcome_has_the_largest_difference() -> None:
    before = [Effect(Behaviour.EXACT, "a", 0.2), Effect(Behaviour.EXACT, "b", 0.1)]
    assert all_sound([*before, Effect(Behaviour.REFUSED, "c")]) == Effect(Behaviour.REFUSED, "c", 0.2)
    assert all_sound([*before, Effect(Behaviour.EXACT, "c", 0.0)]) == Effect(Behaviour.EXACT, "c", 0.0)
    assert all_sound([Effect(Behaviour.REFUSED, "c")]).difference is None


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
    assert not any(v.sound for v in (Behaviour.DIED, Behaviour.WRONG, Behaviour.FAILED))
