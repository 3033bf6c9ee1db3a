"""Prompts of coding agents: sub-agents, changing lines, moving reminders, tool calls."""

from __future__ import annotations

from typing import Any

from llamahybrid.harness.conversation import Conversation, Message, Request
from llamahybrid.harness.workloads.chats import TOOL
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload


def sub_agents(speech: Speech) -> Conversation:
    """An agent that hands three tasks to sub-agents; all share tools, each has a history of its own."""
    tools = speech.message(300, "system")
    main = tools + speech.message(60) + speech.reply()
    for number in range(3):
        answer = yield Request(30, main, chat="main")
        sub = tools + speech.message(20, "system") + speech.message(40) + speech.reply()
        for _ in range(3):
            call = yield Request(30, sub, chat=f"sub-{number}")
            sub = [*sub, *call.tokens, *speech.message(80), *speech.reply()]
        report = speech.message(40)
        main = [*main, *answer.tokens, *report, *speech.reply()]


def changing_line(speech: Speech) -> Conversation:
    """The system prompt says the time in its middle; the chat below it only grows."""
    before, after = speech.message(80, "system"), speech.words(120)
    history: list[int] = []
    for _ in range(5):
        history += speech.message(60) + speech.reply()
        answer = yield Request(30, before + speech.words(6) + after + history)
        history += answer.tokens


def moving_reminder(speech: Speech) -> Conversation:
    """A block of 40 tokens stands before the last question, and goes when the next one comes."""
    reminder = speech.message(40)
    history = speech.message(200, "system")
    for _ in range(6):
        question = speech.message(50) + speech.reply()
        answer = yield Request(30, history + reminder + question)
        history = [*history, *question, *answer.tokens]


def _chat(speech: Speech) -> list[Message]:
    return [{"role": "system", "content": speech.sentence(100)}]


def dated_chat(speech: Speech) -> Conversation:
    """A chat whose system prompt begins with the time of day."""
    text = speech.sentence(100)
    messages: list[Message] = []
    for turn in range(5):
        system = {"role": "system", "content": f"It is 2026-03-01 09:{10 + 7 * turn}. {text}"}
        messages.append({"role": "user", "content": speech.sentence(30)})
        answer = yield Request(30, messages=[system, *messages])
        messages.append({"role": "assistant", "content": answer.text()})


def reminded_chat(speech: Speech) -> Conversation:
    """A reminder stands before the last question, and goes when the next one comes."""
    reminder = {"role": "user", "content": "Remember: " + speech.sentence(30)}
    messages = _chat(speech)
    for _ in range(5):
        question = {"role": "user", "content": speech.sentence(30)}
        answer = yield Request(30, messages=[*messages, reminder, question])
        messages += [question, {"role": "assistant", "content": answer.text()}]


def called_tools(speech: Speech) -> Conversation:
    """A question, then four tool calls with their results; nothing is taken back."""
    messages = [*_chat(speech), {"role": "user", "content": speech.sentence(30)}]
    for number in range(4):
        answer = yield Request(40, messages=messages, tools=[TOOL])
        arguments = {"name": "fetch", "arguments": {"url": f"/{number}"}}
        call: dict[str, Any] = {"type": "function", "id": str(number), "function": arguments}
        messages += [
            {"role": "assistant", "content": answer.text(), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": str(number), "content": speech.sentence(60)},
        ]


# A checkpoint in front of a block that is removed by the next turn is a matter of luck.
AGENTS = (
    Workload("sub-agents", sub_agents),
    Workload("changing line", changing_line, bound=1.1),
    Workload("moving reminder", moving_reminder, bound=1.5),
    Workload("chat: changing line", dated_chat, bound=1.1, template=True),
    Workload("chat: moving reminder", reminded_chat, bound=1.5, template=True),
    Workload("chat: tool calls", called_tools, n_ctx=8192, bound=1.2, template=True),
)
