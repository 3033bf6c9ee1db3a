"""Agents do to their prompts what their names promise; the answers are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise

from llamahybrid.evaluate.agents import (
    called_tools,
    changing_line,
    dated_chat,
    moving_reminder,
    reminded_chat,
    sub_agents,
)
from llamahybrid.evaluate.conversation import Answer, Conversation, Request
from llamahybrid.evaluate.oracle import common_prefix
from llamahybrid.evaluate.speech import Speech
from tests.lab.pretend import PretendSpeech, made_up


def said(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def asked(start: Callable[[Speech], Conversation]) -> Iterator[tuple[Request, Answer]]:
    conversation = start(PretendSpeech())
    request: Request | None = next(conversation)
    number = 0
    while request is not None:
        number += 1
        answer = Answer(made_up(request.tokens, request.max_tokens, number), said)
        yield deepcopy(request), answer
        try:
            request = conversation.send(answer)
        except StopIteration:
            request = None


def test_sub_agents_share_their_tools_and_each_goes_on_with_its_own_history() -> None:
    pairs = list(asked(sub_agents))
    tools = list(pairs[0][0].tokens[:300])
    last: dict[str, list[int]] = {}
    for request, answer in pairs:
        assert list(request.tokens[:300]) == tools
        known = last.get(request.chat, tools)
        assert list(request.tokens[: len(known)]) == known
        last[request.chat] = [*request.tokens, *answer.tokens]
    subs = [f"sub-{number}" for number in range(3)]
    assert [r.chat for r, _ in pairs] == [chat for sub in subs for chat in ("main", sub, sub, sub)]
    for one, two in pairwise(last[sub] for sub in subs):
        assert common_prefix(one, two) < 330, "beyond the tools and the marks there is nothing in common"


def test_a_line_changes_in_the_middle_of_the_prompt_and_all_else_stays() -> None:
    for (before, answer), (after, _) in pairwise(asked(changing_line)):
        assert before.tokens[:80] == after.tokens[:80]
        assert before.tokens[80:86] != after.tokens[80:86]
        rest = [*before.tokens[86:], *answer.tokens]
        assert after.tokens[86 : 86 + len(rest)] == rest


def test_a_reminder_stands_before_the_last_question_alone() -> None:
    pairs = list(asked(moving_reminder))
    assert len(pairs) == 6
    reminder = pairs[0][0].tokens[200:240]
    for (before, answer), (after, _) in pairwise(pairs):
        assert before.tokens[-93:-53] == after.tokens[-93:-53] == reminder
        kept = [*before.tokens[:-93], *before.tokens[-53:], *answer.tokens]
        assert after.tokens[:-93] == kept


def test_a_dated_chat_says_another_time_each_turn_and_only_grows_below() -> None:
    for (before, answer), (after, _) in pairwise(asked(dated_chat)):
        (old, *rest), (new, *grown) = before.messages, after.messages
        assert old["content"].partition(". ")[2] == new["content"].partition(". ")[2]
        assert old["content"] != new["content"]
        assert grown[:-1] == [*rest, {"role": "assistant", "content": answer.text()}]


def test_a_reminded_chat_has_one_reminder_before_its_last_question() -> None:
    for (before, answer), (after, _) in pairwise(asked(reminded_chat)):
        *history, reminder, question = before.messages
        assert after.messages[-2] == reminder
        assert reminder not in after.messages[:-2]
        assert after.messages[:-2] == [*history, question, {"role": "assistant", "content": answer.text()}]


def test_each_tool_call_is_followed_by_its_result_and_nothing_is_taken_back() -> None:
    for number, ((before, answer), (after, _)) in enumerate(pairwise(asked(called_tools))):
        *history, call, result = after.messages
        assert history == before.messages
        assert call["content"] == answer.text()
        assert [each["id"] for each in call["tool_calls"]] == [str(number)] == [result["tool_call_id"]]
        assert after.tools
