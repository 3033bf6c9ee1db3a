"""Playing a workload: order of requests, turns of chats, and the answers that clients continue."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.runner import RequestResult, WorkloadRunner, answer_of
from llamahybrid.harness.targets.base import Ask, Reply, Session
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from llamahybrid.harness.workloads.tokens import Workload


class Echo(Session):
    """Answers with two tokens and remembers what it was asked."""

    vocabulary = Vocabulary(tuple(range(1000)), None, None)

    def __init__(self) -> None:
        self.asked: list[Ask] = []

    def ask(self, ask: Ask) -> Reply:
        self.asked.append(ask)
        return Reply("text", 0.5, tokens=(7, 8))

    def sameness(self, ask: Ask, reply: Reply) -> tuple[Sameness, str]:
        return "same", ""

    def spell(self, tokens: Sequence[int], special: bool = True) -> str | None:
        return f"{'all' if special else 'plain'} {list(tokens)}"


def _three(speech: Speech) -> Conversation:
    history = speech.words(20)
    for _ in range(3):
        answer = yield Request(2, history)
        history += [*answer.tokens, *speech.words(3)]


def _places(played: Sequence[RequestResult]) -> list[tuple[str, int, int]]:
    return [(each.chat, each.turn, each.number) for each in played]


def test_each_request_is_built_from_the_answer_before() -> None:
    session = Echo()
    played = WorkloadRunner(session).converse(Workload("three", _three))
    assert [each.ask for each in played] == session.asked
    first, second, third = (ask.tokens for ask in session.asked)
    assert second[:22] == (*first, 7, 8)
    assert third[:27] == (*second, 7, 8)
    assert _places(played) == [("0", 0, 0), ("0", 1, 1), ("0", 2, 2)]


def test_clients_take_turns_on_a_serial_target() -> None:
    session = Echo()
    played = WorkloadRunner(session).converse(Workload("three", _three, clients=2))
    assert _places(played) == [("0", 0, 0), ("1", 0, 0), ("0", 1, 1), ("1", 1, 1), ("0", 2, 2), ("1", 2, 2)]
    assert session.asked[0].tokens != session.asked[1].tokens, "each has words of its own"


def test_clients_ask_at_once_on_a_parallel_target() -> None:
    class AtOnce(Echo):
        parallel = 2
        meeting = threading.Barrier(2, timeout=60)

        def ask(self, ask: Ask) -> Reply:
            self.meeting.wait()  # breaks where nobody else comes
            return super().ask(ask)

    played = WorkloadRunner(AtOnce()).converse(Workload("three", _three, clients=2))
    assert sorted(_places(played)) == [(chat, turn, turn) for chat in "01" for turn in range(3)]
    assert [each.sent for each in played] == sorted(each.sent for each in played)


@pytest.mark.parametrize(("salts", "sent"), [(False, ""), (None, "s"), (True, "s")])
def test_salts_are_sent_unless_the_target_has_none(salts: bool | None, sent: str) -> None:
    session = Echo()
    session.salts = salts
    told: list[RequestResult] = []
    player = WorkloadRunner(session, told.append)
    player.ask(Ask(2, (1, 2), salt="s"))
    assert session.asked[0].salt == sent
    assert told == player.played
    assert told[0].ask.salt == sent


@pytest.mark.parametrize("text", ["", "short", "some words " * 30])
def test_answer_without_tokens_is_split_by_text(text: str) -> None:
    answer = answer_of(Echo(), Reply(text, 0.5))
    assert answer.text() == text
    assert answer.text(0, 60) + answer.text(60) == text
    assert len(answer.text(0, 50)) == len(text) // 2
