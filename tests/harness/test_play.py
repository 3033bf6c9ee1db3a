"""Playing a workload: order of requests, turns of chats, and the answers that clients continue."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.runner import RequestResult, WorkloadRunner, answer_of
from llamahybrid.harness.targets.base import Reply
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload
from tests.harness.pretended import PretendSession


def echo() -> tuple[PretendSession, list[Request]]:
    """A session, and what it is asked."""
    asked: list[Request] = []
    return PretendSession(asked.append), asked


def _three(speech: Speech) -> Conversation:
    history = speech.words(20)
    for _ in range(3):
        answer = yield Request(2, history)
        history += [*answer.tokens, *speech.words(3)]


def _places(played: Sequence[RequestResult]) -> list[tuple[str, int, int]]:
    return [(each.chat, each.turn, each.number) for each in played]


def test_each_request_is_built_from_the_answer_before() -> None:
    session, asked = echo()
    played = WorkloadRunner(session).converse(Workload("three", _three))
    assert [each.request for each in played] == asked
    first, second, third = (ask.tokens for ask in asked)
    assert second[:22] == (*first, *(played[0].reply.tokens or ()))
    assert third[:27] == (*second, *(played[1].reply.tokens or ()))
    assert _places(played) == [("0", 0, 0), ("0", 1, 1), ("0", 2, 2)]


def test_clients_take_turns_on_a_serial_target() -> None:
    session, asked = echo()
    played = WorkloadRunner(session).converse(Workload("three", _three, clients=2))
    assert _places(played) == [("0", 0, 0), ("1", 0, 0), ("0", 1, 1), ("1", 1, 1), ("0", 2, 2), ("1", 2, 2)]
    assert asked[0].tokens != asked[1].tokens, "each has words of its own"


def test_clients_ask_at_once_on_a_parallel_target() -> None:
    meeting = threading.Barrier(2, timeout=60)
    session = PretendSession(lambda ask: meeting.wait())  # breaks where nobody else comes
    session.parallel = 2
    played = WorkloadRunner(session).converse(Workload("three", _three, clients=2))
    assert sorted(_places(played)) == [(chat, turn, turn) for chat in "01" for turn in range(3)]
    assert [each.sent for each in played] == sorted(each.sent for each in played)


@pytest.mark.parametrize(("salts", "sent"), [(False, ""), (None, "s"), (True, "s")])
def test_salts_are_sent_unless_the_target_has_none(salts: bool | None, sent: str) -> None:
    session, asked = echo()
    session.salts = salts
    told: list[RequestResult] = []
    player = WorkloadRunner(session, told.append)
    player.ask(Request(2, (1, 2), salt="s"))
    assert asked[0].salt == sent
    assert told == player.played
    assert told[0].request.salt == sent


@pytest.mark.parametrize("text", ["", "short", "some words " * 30])
def test_answer_without_tokens_is_split_by_text(text: str) -> None:
    answer = answer_of(PretendSession(print), Reply(text, 0.5))
    assert answer.text() == text
    assert answer.text(0, 60) + answer.text(60) == text
    assert len(answer.text(0, 50)) == len(text) // 2
