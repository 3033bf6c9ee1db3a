"""What a probe makes of what it saw: a verdict, and words for it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from llamahybrid.hazards.bench import Gap
from llamahybrid.hazards.probe import (
    GEMMA3,
    LLAMA,
    QWEN35,
    Model,
    Outcome,
    Verdict,
    all_sound,
    on,
    probe,
    probes_in,
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
def test_who_says_yes_must_go_on_right_or_not_at_all(gap: Gap | int, outcome: Outcome) -> None:
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
def test_who_says_no_must_leave_what_was_there_or_drop_it(gap: Gap | int, outcome: Outcome) -> None:
    assert refused(gap, "no") == outcome


def test_the_first_that_is_not_sound_counts_and_ends_it() -> None:
    def tried() -> Iterator[Outcome]:
        yield Outcome(Verdict.EXACT)
        yield wrong("bad")
        raise AssertionError("nothing is done after it")

    assert all_sound(tried()) == wrong("bad")
    with pytest.raises(ValueError, match="nothing was tried"):
        all_sound([])


def test_the_last_that_is_sound_shows_the_largest_difference() -> None:
    before = [Outcome(Verdict.EXACT, "a", 0.2), Outcome(Verdict.EXACT, "b", 0.1)]
    assert all_sound([*before, Outcome(Verdict.REFUSED, "c")]) == Outcome(Verdict.REFUSED, "c", 0.2)
    assert all_sound([*before, Outcome(Verdict.EXACT, "c", 0.0)]) == Outcome(Verdict.EXACT, "c", 0.0)
    assert all_sound([Outcome(Verdict.REFUSED, "c")]).difference is None


@pytest.mark.parametrize("verdict", list(Verdict))
def test_an_outcome_survives_the_way_to_its_parent(verdict: Verdict) -> None:
    outcome = Outcome(verdict, "said", 0.5)
    assert Outcome.from_json(outcome.as_json()) == outcome


def test_a_probe_knows_its_models_and_says_what_is_done() -> None:
    @probe(
        "title",
        site="x.cpp: f",
        sound="refuses",
        verdicts=(Verdict.DIED, Verdict.REFUSED),
        says="no",
        also=on(Verdict.WRONG, "jamba", LLAMA),
        otherwise={LLAMA: (Verdict.EXACT, "yes")},
    )
    def what_is_done(bench: object) -> Outcome:
        """Do this,
        then that.
        """
        return wrong("")

    made = what_is_done
    assert (made.id, made.stock, made.patched) == ("what-is-done", Verdict.DIED, Verdict.REFUSED)
    assert probes_in(locals()) == (made, made)
    assert made.done == "Do this, then that."
    assert made.known == {QWEN35: Verdict.DIED, Model("jamba"): Verdict.WRONG, LLAMA: Verdict.WRONG}
    assert [made.mended(model) for model in (QWEN35, LLAMA)] == [
        (Verdict.REFUSED, "no"),
        (Verdict.EXACT, "yes"),
    ]


def test_a_models_name_tells_its_sizes() -> None:
    assert [model.name for model in (LLAMA, GEMMA3, Model("qwen35", embd=192))] == [
        "llama",
        "gemma3-window16",
        "qwen35-embd192",
    ]
