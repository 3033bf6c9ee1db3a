"""What a report says in words."""

from __future__ import annotations

import pytest

from llamahybrid.evaluate.probes import PROBES
from llamahybrid.evaluate.render.sentences import (
    described,
    faults,
    headline,
    of_target,
    outcome,
    overall,
    sentence,
)
from tests.evaluate.reports import report, request, target, verdict, workload


def texts(*workloads: object, **more: object) -> list[tuple[str, str]]:
    return [(said.outcome, said.text) for said in of_target(target("ours", *workloads, **more))]  # type: ignore[arg-type]


def test_a_sound_target_in_plain_sentences_with_its_figures() -> None:
    assert texts(workload(), workload("other", decoded=250)) == [
        (
            "ok",
            "It reuses what it decoded before: 490 tokens decoded where 480 had to be, 1.02 times the least.",
        ),
        ("ok", "Its answers are those of a context that reused nothing: 8 of 8 compared."),
    ]


def test_faults_come_first_and_say_where_and_why() -> None:
    wrong = workload(
        "w", verdicts=(verdict(), verdict("exact", "bad", "turn 3")), requests=(request(answer="different"),)
    )
    first, *rest = texts(workload(), wrong)
    assert first == (
        "bad",
        "Its answers are not those of a context that reused nothing: reused state was wrong, in 1 of 2 "
        "workloads (“w”): 4 of 5 compared. There: turn 3.",
    )
    assert [kind for kind, _ in rest] == ["ok"]


def test_what_cannot_be_told_is_said_and_is_not_a_fault() -> None:
    hidden = workload("hidden", verdicts=(verdict("reuse", "cannot tell", "it hides that"),))
    (one,) = texts(workload("seen", verdicts=(verdict(),)), hidden)
    assert one == (
        "cannot tell",
        "It reuses what it decoded before in 1 of 2 workloads; for “hidden” it cannot be told. "
        "There: it hides that.",
    )
    assert texts(hidden)[0][1].startswith(
        "Whether it reuses what it decoded before cannot be told, in 1 of 1 workload"
    )
    assert outcome(target("ours", hidden)) == "cannot tell"
    assert outcome(target("ours", hidden, workload())) == "ok"


def test_an_error_and_hazards() -> None:
    hazards = tuple(verdict(f"hazard:{name}", "bad" if name in "abcd" else "ok") for name in "abcdefg")
    said = texts(hazards=hazards, error="it died")
    assert said[:2] == [
        ("bad", "It did not run to its end: it died."),
        ("bad", "4 of 7 hazards of the native memory hit it: a, b, c and 1 more."),
    ]
    assert texts(hazards=hazards[4:])[-1] == ("ok", "None of 3 hazards of the native memory hits it.")


@pytest.mark.parametrize("result", ["ok", "bad", "cannot tell"])
@pytest.mark.parametrize("name", ["reuse", "a-new-verdict", "hazard:rollback-twice"])
def test_every_verdict_has_words_and_each_outcome_its_own(name: str, result: object) -> None:
    words = {described(name, each) for each in ("ok", "bad", "cannot tell")}  # type: ignore[arg-type]
    assert len(words) == 3
    assert all(name.removeprefix("hazard:") in each for each in words) or name == "reuse"
    said = sentence(verdict(name, result, "why"))
    assert said.text.endswith(": why.")
    assert said.outcome == result


def test_the_headline_counts_targets() -> None:
    bad = workload(verdicts=(verdict("exact", "bad"),))
    some = report(target("a"), target("b", bad), target("c", workload(verdicts=())))
    assert headline(some) == "1 of 3 targets came through without a fault; 1 did not; of 1 it cannot be told."
    slow = target("slow", workload(verdicts=(verdict(outcome="bad"), verdict("exact"))))
    wrong = target("wrong", workload(verdicts=(verdict(outcome="bad"), verdict("exact", "bad"))))
    only = "only by decoding more than they had to."
    assert (
        headline(report(slow)) == f"0 of 1 target came through without a fault; 1 did not, all of them {only}"
    )
    assert headline(report(slow, wrong, slow)).endswith(f"; 3 did not, 2 of them {only}")
    assert headline(report()) == "1 of 1 target came through without a fault."


def test_a_workload_in_a_word() -> None:
    both = workload(verdicts=(verdict("reuse", "bad"), verdict("exact", "bad"), verdict("x", "cannot tell")))
    assert faults(both) == "bad: reuse, exact"
    assert faults(workload()) == overall(workload().verdicts) == "ok"


@pytest.mark.parametrize("name", ["reuse", "exact", "memory-flat", *(probe.name for probe in PROBES)])
def test_the_harness_own_verdicts_have_words_of_their_own(name: str) -> None:
    assert not [each for each in ("ok", "bad", "cannot tell") if name in described(name, each).split("'")]  # type: ignore[arg-type]
