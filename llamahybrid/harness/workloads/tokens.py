"""Conversations as bare tokens: they run on every architecture and vocabulary.

Each follows what people do with a chat, and is built from the answers the model really gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.workloads.speech import Speech


@dataclass(frozen=True)
class Workload:
    """A conversation to measure."""

    name: str
    start: Callable[[Speech], Conversation]
    n_ctx: int = 4096
    measured_from: int = 1
    """Number of the first counted request: a cold first one is the same for all and would dilute ratios."""
    bound: float = 1.02
    """Oracle ratio that llamahybrid promises."""
    template: bool = False
    """Needs a model with a chat template."""
    marked: bool = True
    """Messages start with control tokens, as chat templates have it."""
    clients: int = 1
    """Number of clients at once, each with words of its own; in turn if the target takes one."""


RAW_BOUND = 1.06


def raw(workload: Workload) -> Workload:
    """Return the same conversation without control tokens at the starts of messages."""
    name, bound = f"raw: {workload.name}", max(workload.bound, RAW_BOUND)
    return replace(workload, name=name, bound=bound, marked=False)


def _joined(parts: Iterable[Sequence[int]]) -> list[int]:
    return [token for part in parts for token in part]


def exact_append(speech: Speech, system: int = 120, turns: int = 6, message: int = 50) -> Conversation:
    """Each prompt is the one before, its answer, and a new message."""
    history = speech.message(system, "system")
    for _ in range(turns):
        history += speech.message(message) + speech.reply()
        answer = yield Request(48, history)
        history += answer.tokens


def thinking_stripped(
    speech: Speech, system: int = 200, turns: int = 8, answer: int = 100, thinking: int = 60
) -> Conversation:
    """The first 60 tokens of each answer are thinking, and history goes back without them."""
    history = speech.message(system, "system")
    for _ in range(turns):
        history += speech.message(60)
        said = yield Request(answer, history + speech.reply(thinking=True))
        history += speech.reply() + speech.spoken(said.tokens[speech.size(thinking) :])


def regenerate(speech: Speech, system: int = 200, answers: int = 7) -> Conversation:
    """A prompt that is answered seven times, each time with another seed."""
    prompt = speech.message(system, "system") + speech.message(97) + speech.reply()
    for seed in range(answers):
        yield Request(40, prompt, seed=seed)


def edit_middle(
    speech: Speech, system: int = 150, turns: int = 5, message: int = 60, edited: int = 3
) -> Conversation:
    """After five turns the third message is rewritten, everything behind it kept, and the chat goes on."""
    parts = [speech.message(system, "system")]
    for turn in range(turns + 2):
        if turn == turns:
            parts[2 * edited - 1] = speech.message(message) + speech.reply()
        parts.append(speech.message(message) + speech.reply())
        answer = yield Request(40, _joined(parts))
        parts.append(list(answer.tokens))


def agent_loop(speech: Speech) -> Conversation:
    """Tools and a task, then eight calls with a tool result of 200 tokens each."""
    history = speech.message(400, "system") + speech.message(40) + speech.reply()
    for _ in range(8):
        answer = yield Request(40, history)
        history = [*history, *answer.tokens, *speech.message(200), *speech.reply()]


def tool_pages(speech: Speech) -> Conversation:
    """Three questions; thinking stays while tool calls and pages of 900 tokens follow, then goes."""
    history = speech.message(300, "system")
    for _ in range(3):
        history += speech.message(40)
        turn: list[int] = []
        shown: list[int] = []
        for page in (900, 900, 0):
            answer = yield Request(60, history + turn + speech.reply(thinking=True))
            fetched = speech.message(page) if page else []
            turn += [*speech.reply(thinking=True), *answer.tokens, *fetched]
            shown += [*speech.reply(), *speech.spoken(answer.tokens[speech.size(30) :]), *fetched]
        history += shown


def mid_generation(speech: Speech) -> Conversation:
    """An answer of 700 tokens, then histories that keep 95, 70, 45, 20 and 8 % of it and go on from there."""
    prompt = speech.message(97, "system") + speech.reply()
    long = yield Request(700, prompt)
    for percent in (95, 70, 45, 20, 8):
        kept = long.tokens[: len(long.tokens) * percent // 100]
        yield Request(40, [*prompt, *kept, *speech.message(37), *speech.reply()])


FIVE_TURNS = (57, 192, 305, 443, 603)


def five_turns(speech: Speech) -> Conversation:
    """The five prompts of llama.cpp PR 22534: a thinking chat of 57, 192, 305, 443 and 603 prompt tokens."""
    history: list[int] = []
    tail = len(speech.reply(thinking=True))
    for total in FIVE_TURNS:
        history += speech.message(total - len(history) - tail)
        answer = yield Request(60, history + speech.reply(thinking=True))
        history += speech.reply() + speech.spoken(answer.tokens[speech.size(20) :])


def long_then_followup(speech: Speech) -> Conversation:
    """The probe of ollama PR 15914: a long generation, then a follow-up of 430 tokens of which 96 match."""
    head = speech.message(93)
    answer = yield Request(300, head + speech.reply(thinking=True))
    history = head + speech.reply() + speech.spoken(answer.tokens[speech.size(200) :])
    tail = speech.reply(thinking=True)
    yield Request(20, history + speech.message(430 - len(history) - len(tail)) + tail)


def unrelated(speech: Speech) -> Conversation:
    """Four prompts that have nothing to do with each other."""
    for length in (180, 240, 120, 300):
        yield Request(24, speech.words(length) + speech.reply())


LONG_PROMPT = 49_623


def long_prompt(speech: Speech) -> Conversation:
    """A prompt of 49,623 tokens, repeated exactly, then with one message in its middle rewritten."""
    sizes = [500] * (LONG_PROMPT // 500) + [LONG_PROMPT % 500 - 3]
    messages = [speech.message(size) for size in sizes]
    prompt = _joined(messages) + speech.reply()
    yield Request(4, prompt)
    yield Request(4, prompt)
    messages[len(messages) // 2] = speech.message(500)
    yield Request(4, _joined(messages) + speech.reply())


TOKEN_WORKLOADS = (
    Workload("exact append", exact_append),
    Workload("thinking stripped", thinking_stripped),
    Workload("regenerate x 6", regenerate),
    Workload("edit a middle message", edit_middle),
    Workload("agent loop", agent_loop),
    Workload("tool calls and pages", tool_pages, n_ctx=8192),
    Workload("mid-generation", mid_generation, bound=1.2),
    Workload("five turns", five_turns),
    Workload("long answer, follow-up", long_then_followup),
    Workload("four unrelated prompts", unrelated),
    # Restore points far from a prompt's end lie ever wider apart: within a constant factor, not within 2 %.
    Workload("prompt of 49,623 tokens", long_prompt, n_ctx=50_176, bound=2.0),
)
