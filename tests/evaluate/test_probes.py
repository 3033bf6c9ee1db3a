"""Directed probes on a cache of nothing but lengths: each calls its own fault by name, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamahybrid.evaluate import probes
from llamahybrid.evaluate.probes import COUNTED, PROBES, WARM, Script, memory, run
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
def test_nothing_is_said_of_a_sound_cache(name: str) -> None:
    assert verdict(Cache(), name).outcome == "ok"


@pytest.mark.parametrize("name", BY_NAME)
def test_what_hides_all_but_its_answers_is_not_blamed(name: str) -> None:
    session = Cache(hides=True)
    session.answers = dict.fromkeys(range(9), "unknown")
    assert verdict(session, name).outcome == "cannot tell"


def test_a_cache_that_never_finds_is_called_by_its_name() -> None:
    found = verdict(Cache(finds=False), "hits")
    assert (found.outcome, found.detail) == ("bad", "a prompt of 160 tokens went on: 0 of them were reused")
    assert verdict(Cache(finds=False), "salt-kept-apart").outcome == "cannot tell"


def test_salts_that_are_mixed_are_called_by_their_name() -> None:
    found = verdict(Cache(mixes=True), "salt-kept-apart")
    assert found.outcome == "bad"
    assert "400 tokens of another salt's prompt were reused" in found.detail


def test_more_than_was_reused_is_called_by_its_name() -> None:
    assert verdict(Cache(boasts=100), "reports-what-it-reused").outcome == "bad"


def test_a_reuse_of_more_than_there_was_in_common_explains_a_wrong_answer() -> None:
    session = Cache(boasts=9)
    session.answers = {1: "different"}
    assert verdict(session, "restores-a-prefix").outcome == "bad"
    other = Cache(boasts=9)
    other.answers = {1: "different"}
    found = verdict(other, "cuts-the-tail")
    assert (found.outcome, "more was reused" in found.detail) == ("cannot tell", True)


@pytest.mark.parametrize("name", ["cuts-the-tail", "rolls-back-to-its-position", "own-attention"])
def test_a_wrong_answer_is_called_by_its_name(name: str) -> None:
    session = Cache()
    session.answers = {2: "different"}
    assert verdict(session, name) == Verdict(name, "bad", "answer 2")
    first = Cache()
    first.answers = {0: "different"}  # of a cold cache: another fault
    assert verdict(first, name).outcome == "ok"


def test_cuts_that_are_bad_are_not_blamed_on_rollback_once_more() -> None:
    session = Cache()
    session.answers = {2: "different"}
    found = verdict(session, "rolls-back-to-its-position", "cuts-the-tail")
    assert (found.outcome, "'cuts-the-tail' is bad" in found.detail) == ("cannot tell", True)


@pytest.mark.parametrize(
    ("name", "lacks", "said"),
    [
        ("rolls-back-to-its-position", "takes_tokens", "the target takes no token ids"),
        ("salt-kept-apart", "salts", "the target has no salts"),
    ],
)
def test_nothing_is_asked_of_a_target_that_cannot_take_it(name: str, lacks: str, said: str) -> None:
    session = Cache()
    setattr(session, lacks, False)
    assert verdict(session, name) == Verdict(name, "cannot tell", said)
    assert not session.asked


def test_the_last_few_tokens_are_taken_back() -> None:
    session = Cache()
    run(session, BY_NAME["rolls-back-to-its-position"], set())
    again = zip(session.stored, session.asked[1:], strict=False)
    assert [len(held) - common(held, ask.tokens) for (_, held), ask in again] == [1, 2, 3, 2]


def test_pieces_are_messages_where_token_ids_are_not_taken() -> None:
    session = Cache()
    Script(session).ask([1, 2], [3], n=5, salt="s")
    session.takes_tokens = False
    Script(session).ask([1, 2], [3], n=5, salt="s")
    contents = ({"role": "user", "content": "w1 w2"}, {"role": "user", "content": "w3"})
    assert session.asked == [Ask(5, (1, 2, 3), salt="s"), Ask(5, messages=contents, salt="s")]


def test_words_are_the_same_for_a_seed_and_others_for_a_nonce() -> None:
    session, other = Cache(), Cache()
    other.nonce = "another run"
    said = Script(session, 1).words(30)
    assert len(said) == 30
    assert said == Script(session, 1).words(30)
    assert said not in (Script(session, 2).words(30), Script(other, 1).words(30))


def _memory(sizes: Callable[[int], int] | None) -> tuple[int | None, str]:
    session = Cache(finds=False)
    session.sizes = sizes
    found = memory(session)
    (judged,) = found.verdicts
    assert judged.name == "memory-flat"
    return found.memory_growth, judged.outcome


def test_memory_that_grows_by_states_is_bad() -> None:
    assert _memory(lambda asked: 501 * asked) == (501, "bad")
    assert _memory(lambda asked: 500 * asked) == (500, "ok")


def test_what_grows_at_first_or_once_is_no_leak() -> None:
    assert _memory(lambda asked: 9000 * min(asked, WARM)) == (0, "ok")
    assert _memory(lambda asked: 10**9 * (asked > WARM + COUNTED)) == (0, "ok")


def test_memory_that_is_not_told_is_not_judged() -> None:
    assert _memory(None) == (None, "cannot tell")


def test_memory_hears_nothing_new() -> None:
    session = Cache(finds=False)
    memory(session)
    assert len(session.asked) == WARM + probes.ROUNDS * COUNTED
    assert len({ask.tokens for ask in session.asked}) == 2
