"""Conversations as chat messages, for models with a chat template."""

from __future__ import annotations

from typing import Any

from llamahybrid.harness.conversation import Answer, Conversation, Message, Request
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "fetch",
        "description": "Fetch a page and return its text",
        "parameters": {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]},
    },
}


def _system(speech: Speech, words: int = 120) -> list[Message]:
    return [{"role": "system", "content": speech.sentence(words)}]


def _user(speech: Speech, words: int = 40) -> Message:
    return {"role": "user", "content": speech.sentence(words)}


def _thought(answer: Answer, thinking: int) -> str:
    """The whole answer as a client of a thinking model sends it back inside a tool loop."""
    return f"<think>\n{answer.text(0, thinking)}\n</think>\n\n{answer.text(thinking)}"


def _called(text: str, number: int, result: str) -> list[Message]:
    """An answer that calls the tool, and the result of that."""
    call = {"name": "fetch", "arguments": {"url": f"/{number}"}}
    calls = [{"type": "function", "id": str(number), "function": call}]
    return [
        {"role": "assistant", "content": text, "tool_calls": calls},
        {"role": "tool", "tool_call_id": str(number), "content": result},
    ]


def stripped_chat(speech: Speech) -> Conversation:
    """Eight turns; the first 60 tokens of each answer are thinking, which a client does not send back."""
    messages = _system(speech)
    for _ in range(8):
        messages.append(_user(speech))
        answer = yield Request(100, messages=messages)
        messages.append({"role": "assistant", "content": answer.text(speech.size(60))})


def regenerated_chat(speech: Speech) -> Conversation:
    """A question that is answered seven times, each time with another seed."""
    messages = [*_system(speech), _user(speech, 80)]
    for seed in range(7):
        yield Request(40, messages=messages, seed=seed)


def edited_chat(speech: Speech) -> Conversation:
    """After five turns the user's third message is rewritten and the rest kept; then one turn more."""
    messages = _system(speech)
    for _ in range(5):
        messages.append(_user(speech))
        answer = yield Request(80, messages=messages)
        messages.append({"role": "assistant", "content": answer.text(speech.size(40))})
    messages[5] = _user(speech)
    for _ in range(2):
        messages.append(_user(speech))
        answer = yield Request(80, messages=messages)
        messages.append({"role": "assistant", "content": answer.text(speech.size(40))})


def agent_chat(speech: Speech) -> Conversation:
    """Two questions with three tool calls each; the template drops their thinking at the next question."""
    messages = _system(speech)
    for _ in range(2):
        messages.append(_user(speech))
        for words in (40, 80, 120):
            answer = yield Request(80, messages=messages, tools=[TOOL])
            messages += _called(_thought(answer, speech.size(60)), 1, speech.sentence(words))
        answer = yield Request(80, messages=messages, tools=[TOOL])
        messages.append({"role": "assistant", "content": answer.text(speech.size(60))})


def dated_chat(speech: Speech) -> Conversation:
    """A chat whose system prompt begins with the time of day."""
    text = speech.sentence(100)
    messages: list[Message] = []
    for turn in range(5):
        system = {"role": "system", "content": f"It is 2026-03-01 09:{10 + 7 * turn}. {text}"}
        messages.append(_user(speech, 30))
        answer = yield Request(30, messages=[system, *messages])
        messages.append({"role": "assistant", "content": answer.text()})


def reminded_chat(speech: Speech) -> Conversation:
    """A reminder stands before the last question, and goes when the next one comes."""
    reminder = {"role": "user", "content": "Remember: " + speech.sentence(30)}
    messages = _system(speech, 100)
    for _ in range(5):
        question = _user(speech, 30)
        answer = yield Request(30, messages=[*messages, reminder, question])
        messages += [question, {"role": "assistant", "content": answer.text()}]


def called_tools(speech: Speech) -> Conversation:
    """A question, then four tool calls with their results; nothing is taken back."""
    messages = [*_system(speech, 100), _user(speech, 30)]
    for number in range(4):
        answer = yield Request(40, messages=messages, tools=[TOOL])
        messages += _called(answer.text(), number, speech.sentence(60))


CHAT_WORKLOADS = (
    Workload("chat: thinking stripped", stripped_chat, template=True),
    Workload("chat: regenerate x 6", regenerated_chat, template=True),
    Workload("chat: edit a message", edited_chat, template=True),
    # A random model never closes its thinking; the client does, so each call diverges inside the answer.
    Workload("chat: tools and pages", agent_chat, n_ctx=8192, bound=1.2, template=True),
)

# A checkpoint in front of a block that is removed by the next turn is a matter of luck.
CHAT_AGENTS = (
    Workload("chat: changing line", dated_chat, bound=1.1, template=True),
    Workload("chat: moving reminder", reminded_chat, bound=1.5, template=True),
    Workload("chat: tool calls", called_tools, n_ctx=8192, bound=1.2, template=True),
)
