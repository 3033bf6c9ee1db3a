"""Directed probes of a cache each name their own fault, and no other."""

from __future__ import annotations

import pytest

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.directed import PROBES, memory, run
from llamahybrid.harness.report import Sameness, Verdict
from llamahybrid.harness.targets.base import Reply, Session
from llamahybrid.harness.workloads.speech import Vocabulary
from tests.harness.broken import common

BY_NAME = {probe.name: probe for probe in PROBES}


class Cache(Session):
    """Tells how much of each prompt was asked before; keywords plant faults."""

    vocabulary = Vocabulary(tuple(range(1000)), None, None)
    salts = True
    state_bytes = 1000

    def __init__(self, *, boasts: int = 0, hides: bool = False) -> None:
        self.boasts, self.hides = boasts, hides
        self.asked: list[Request] = []
        self.answers: dict[int, Sameness] = {}
        """Comparison of answers by number of the request; default: same."""
        self.checked = 0
        self.stored: list[tuple[str, tuple[int, ...]]] = []

    def ask(self, ask: Request) -> Reply:
        self.asked.append(ask)
        known = [text for salt, text in self.stored if salt == ask.salt]
        same = max((common(text, ask.tokens) for text in known), default=0)
        reused, total = min(same, len(ask.tokens) - 1), len(ask.tokens)
        answer = tuple(500 + len(self.asked) * 16 + n for n in range(ask.max_tokens))
        self.stored.append((ask.salt, (*ask.tokens, *answer[:-1])))
        if self.hides:
            return Reply("text", 0.5)
        decoded = total - reused + len(answer) - 1
        reported = reused + self.boasts
        return Reply("text", 0.5, None, ask.tokens, answer, total, reported, decoded=decoded)

    def sameness(self, ask: Request, reply: Reply) -> tuple[Sameness, str]:
        self.checked += 1
        return self.answers.get(self.checked - 1, "same"), f"answer {self.checked - 1}"


def verdict(session: Session, name: str, *bad: str) -> Verdict:
    (found,) = run(session, BY_NAME[name], set(bad)).verdicts
    assert found.name == name
    return found


def test_rows_that_the_harness_keeps_are_no_growth() -> None:
    class Keeps(Cache):
        rows = True

        def keep_no_rows(self) -> None:
            self.rows = False

        def resident(self) -> int:
            return len(self.asked) * 1000 * self.rows

    (found,) = memory(Keeps()).verdicts
    assert (found.name, found.outcome) == ("memory-flat", "ok")


@pytest.mark.parametrize("name", BY_NAME)
def test_sound_cache_passes(name: str) -> None:
    assert verdict(Cache(), name).outcome == "ok"


@pytest.mark.parametrize("name", BY_NAME)
def test_cache_without_figures_is_not_judged(name: str) -> None:
    session = Cache(hides=True)
    session.answers = dict.fromkeys(range(9), "unknown")
    assert verdict(session, name).outcome == "cannot tell"


def test_too_long_a_reuse_explains_a_wrong_answer() -> None:
    session = Cache(boasts=9)
    session.answers = {1: "different"}
    assert verdict(session, "restores-a-prefix").outcome == "bad"
    other = Cache(boasts=9)
    other.answers = {1: "different"}
    found = verdict(other, "cuts-the-tail")
    assert (found.outcome, "more was reused" in found.detail) == ("cannot tell", True)


@pytest.mark.parametrize("name", ["cuts-the-tail", "rolls-back-to-its-position", "own-attention"])
def test_wrong_answer_is_named(name: str) -> None:
    session = Cache()
    session.answers = {2: "different"}
    assert verdict(session, name) == Verdict(name, "bad", "answer 2")
    first = Cache()
    first.answers = {0: "different"}  # of a cold cache: another fault
    assert verdict(first, name).outcome == "ok"


@pytest.mark.parametrize(
    ("name", "lacks", "said"),
    [
        ("rolls-back-to-its-position", "takes_tokens", "the target takes no token ids"),
        ("salt-kept-apart", "salts", "the target has no salts"),
    ],
)
def test_unsupported_probes_ask_nothing(name: str, lacks: str, said: str) -> None:
    session = Cache()
    setattr(session, lacks, False)
    assert verdict(session, name) == Verdict(name, "cannot tell", said)
    assert not session.asked
