"""Directed probes of a cache each name their own fault, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamahybrid.evaluate.probes import PROBES, memory, run
from llamahybrid.evaluate.report import Sameness, Verdict
from llamahybrid.evaluate.speech import Vocabulary
from llamahybrid.evaluate.targets.base import Ask, Reply, Session
from tests.evaluate.broken import common

BY_NAME = {probe.name: probe for probe in PROBES}


class Cache(Session):
    """Tells how much of each prompt was asked before; keywords plant faults."""

    vocabulary = Vocabulary(tuple(range(1000)), None, None)
    salts = True
    state_bytes = 1000

    def __init__(
        self, *, finds: bool = True, mixes: bool = False, boasts: int = 0, hides: bool = False
    ) -> None:
        self.finds, self.mixes, self.boasts, self.hides = finds, mixes, boasts, hides
        self.asked: list[Ask] = []
        self.answers: dict[int, Sameness] = {}
        """What checks say of answers, by their request's number; else they are right."""
        self.checked = 0
        self.sizes: Callable[[int], int] | None = lambda asked: 0
        """Bytes of memory after so many requests."""
        self.stored: list[tuple[str, tuple[int, ...]]] = []

    def ask(self, ask: Ask) -> Reply:
        self.asked.append(ask)
        known = [text for salt, text in self.stored if self.mixes or salt == ask.salt]
        same = max((common(text, ask.tokens) for text in known), default=0) if self.finds else 0
        reused, total = min(same, len(ask.tokens) - 1), len(ask.tokens)
        answer = tuple(500 + len(self.asked) * 16 + n for n in range(ask.max_tokens))
        self.stored.append((ask.salt, (*ask.tokens, *answer[:-1])))
        if self.hides:
            return Reply("text", 0.5)
        decoded = total - reused + len(answer) - 1
        reported = reused + self.boasts
        return Reply("text", 0.5, None, ask.tokens, answer, total, reported, decoded=decoded)

    def sameness(self, ask: Ask, reply: Reply) -> tuple[Sameness, str]:
        self.checked += 1
        return self.answers.get(self.checked - 1, "same"), f"answer {self.checked - 1}"

    def resident(self) -> int | None:
        return None if self.sizes is None else self.sizes(len(self.asked))


def verdict(session: Session, name: str, *bad: str) -> Verdict:
    (found,) = run(session, BY_NAME[name], set(bad)).verdicts
    assert found.name == name
    return found


@pytest.mark.parametrize("name", BY_NAME)
def test_sound_cache_passes(name: str) -> None:
    assert verdict(Cache(), name).outcome == "ok"


@pytest.mark.parametrize("name", BY_NAME)
def test_cache_without_figures_is_not_judged(name: str) -> None:
    session = Cache(hides=True)
    session.answers = dict.fromkeys(range(9), "unknown")
    assert verdict(session, name).outcome == "cannot tell"


def test_cache_that_never_hits_is_named() -> None:
    found = verdict(Cache(finds=False), "hits")
    assert (found.outcome, found.detail) == ("bad", "a prompt of 160 tokens went on: 0 of them were reused")
    assert verdict(Cache(finds=False), "salt-kept-apart").outcome == "cannot tell"


def test_mixed_salts_are_named() -> None:
    found = verdict(Cache(mixes=True), "salt-kept-apart")
    assert found.outcome == "bad"
    assert "400 tokens of another salt's prompt were reused" in found.detail


def test_overstated_reuse_is_named() -> None:
    assert verdict(Cache(boasts=100), "reports-what-it-reused").outcome == "bad"


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


def _memory(sizes: Callable[[int], int] | None) -> tuple[int | None, str]:
    session = Cache(finds=False)
    session.sizes = sizes
    found = memory(session)
    (judged,) = found.verdicts
    assert judged.name == "memory-flat"
    return found.memory_growth, judged.outcome


def test_growing_memory_is_bad() -> None:
    assert _memory(lambda asked: 501 * asked) == (501, "bad")
    assert _memory(lambda asked: 500 * asked) == (500, "ok")
