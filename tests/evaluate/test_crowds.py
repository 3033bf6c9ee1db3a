"""Crowds share what their names promise, and nothing else; the answers are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from llamahybrid.evaluate.conversation import Conversation, Record
from llamahybrid.evaluate.crowds import (
    document_questions,
    few_shot,
    four_users,
    interrupted_agents,
    shared_system_prompt,
)
from llamahybrid.evaluate.oracle import common_prefix
from llamahybrid.evaluate.speech import Speech
from tests.lab.pretend import PretendSpeech, play


class Nobody:
    """Decodes nothing: only the conversations count here."""

    def ask(self, speech: PretendSpeech, prompt: Sequence[int], answer: Sequence[int]) -> int:
        return 0


def asked(start: Callable[[Speech], Conversation]) -> list[Record]:
    speech = PretendSpeech()
    return list(play(start(speech), speech, Nobody()))


def shared(records: Sequence[Record]) -> int:
    """Tokens that all prompts begin with."""
    return min(common_prefix(records[0].prompt, record.prompt) for record in records)


HEAD = 3
"""Tokens that each system message begins with: mark and role."""


def test_four_users_share_nothing_and_each_goes_on_without_thinking() -> None:
    records = asked(four_users)
    assert len(records) == 20
    assert shared(records[:4]) == HEAD
    for user in range(4):
        for before, after in pairwise(records[user::4]):
            kept = common_prefix(before.prompt, after.prompt)
            assert len(before.prompt) - kept == 2, "the mark of thinking, and the line's end behind it"
            spoken = before.generated[30:]
            assert after.prompt[kept : kept + len(spoken)] == spoken


def test_eight_chats_share_one_system_prompt_and_are_appended_to() -> None:
    records = asked(shared_system_prompt)
    assert len(records) == 24
    assert shared(records) == 400 + HEAD, "and the head of what a user says"
    grown = 0
    for i, record in enumerate(records[8:], 8):
        known = [r for r in records[:i] if record.prompt[: len(r.prompt) + 40] == r.prompt + r.generated]
        grown += len(known) > 0
    assert grown == 16, "each goes on with a chat of its own"


def test_worked_examples_have_another_question_at_the_end_each_time() -> None:
    records = asked(few_shot)
    assert len({record.prompt for record in records}) == len(records) == 10
    assert shared(records) == len(records[0].prompt) - 30 - 3 + HEAD


def test_each_question_starts_from_its_document_alone() -> None:
    records = asked(document_questions)
    assert shared(records) == HEAD
    for document in (records[::2], records[1::2]):
        assert shared(document) == 1540 + HEAD
        assert {len(record.prompt) for record in document} == {1540 + 33}


def test_two_agents_take_turns_at_random_lengths_and_are_appended_to() -> None:
    first, *rest = asked(interrupted_agents)
    last, turns = {first.prompt[:400]: first}, [first.prompt[:400]]
    for record in rest:
        agent = record.prompt[:400]
        if agent in last:
            known = last[agent].prompt + last[agent].generated
            assert record.prompt[: len(known)] == known
            assert len(record.prompt) == len(known) + 203
        last[agent] = record
        turns.append(agent)
    assert len(last) == 2
    assert [len(list(run)) for _, run in groupby(turns)] == [2, 1, 1, 4, 1, 1]
