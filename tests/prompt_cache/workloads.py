"""Chats as token lists: the shapes of history that the oracle ratio is measured on.

A message is `<|im_start|> role newline content <|im_end|> newline`, an answer is asked for with
`<|im_start|> assistant newline <think> newline`; boundaries lie before every start and before `<think>`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

START, END, NEWLINE, THINK, END_THINK = 1, 2, 3, 4, 5
ROLES = {"system": 6, "user": 7, "assistant": 8, "tool": 9}
FIRST_WORD = 10
VOCABULARY = 5000


@dataclass
class Message:
    role: str
    content: list[int]
    thinking: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """A request: a prompt with its boundaries, and the answer that the model will give."""

    prompt: list[int]
    boundaries: list[int]
    answer: list[int]


class Chat:
    """A conversation; `turn` renders it as a request, thinking stripped from history or kept."""

    def __init__(self, seed: int, keep_thinking: bool = False, system: int = 200) -> None:
        self.random = random.Random(seed)
        self.keep_thinking = keep_thinking
        self.messages = [Message("system", self.words(system))]

    def words(self, n: int) -> list[int]:
        return [self.random.randrange(FIRST_WORD, VOCABULARY) for _ in range(n)]

    def say(self, role: str, low: int, high: int) -> None:
        self.messages.append(Message(role, self.words(self.random.randint(low, high))))

    def turn(self, thinking: int = 60, low: int = 40, high: int = 300) -> Turn:
        """Ask for an answer and take it into the history."""
        reply = Message("assistant", self.words(self.random.randint(low, high)), self.words(thinking))
        prompt, boundaries = render(self.messages, self.keep_thinking)
        boundaries += [len(prompt), len(prompt) + 3]
        prompt += [START, ROLES["assistant"], NEWLINE, THINK, NEWLINE]
        self.messages.append(reply)
        return Turn(prompt, boundaries[1:], [*reply.thinking, END_THINK, NEWLINE, *reply.content, END])

    def again(self) -> Turn:
        """The last answer once more, worded differently."""
        self.messages.pop()
        return self.turn()

    def edit(self, index: int) -> None:
        """Reword message `index`; a message keeps its length, and the history after it."""
        old = self.messages[index]
        self.messages[index] = replace(old, content=self.words(len(old.content)))


def render(messages: list[Message], keep_thinking: bool) -> tuple[list[int], list[int]]:
    """Tokens of a history and where its messages (and kept thinking) start."""
    tokens: list[int] = []
    boundaries: list[int] = []
    for message in messages:
        boundaries.append(len(tokens))
        tokens += [START, ROLES[message.role], NEWLINE]
        if keep_thinking and message.role == "assistant":
            boundaries.append(len(tokens))
            tokens += [THINK, NEWLINE, *message.thinking, END_THINK, NEWLINE]
        tokens += [*message.content, END, NEWLINE]
    return tokens, boundaries


def exact_append(seed: int) -> Iterator[Turn]:
    chat = Chat(seed, keep_thinking=True)
    for _ in range(8):
        chat.say("user", 20, 200)
        yield chat.turn()


def thinking_stripped(seed: int) -> Iterator[Turn]:
    chat = Chat(seed)
    for _ in range(8):
        chat.say("user", 20, 200)
        yield chat.turn()


def regenerate(seed: int) -> Iterator[Turn]:
    chat = Chat(seed)
    chat.say("user", 20, 200)
    yield chat.turn()
    for _ in range(6):
        yield chat.again()


def edit_in_the_middle(seed: int) -> Iterator[Turn]:
    chat = Chat(seed)
    for _ in range(6):
        chat.say("user", 20, 200)
        yield chat.turn()
    chat.edit(7)
    yield chat.again()
    chat.say("user", 20, 200)
    yield chat.turn()
    chat.edit(5)
    yield chat.again()


def agent_loop(seed: int) -> Iterator[Turn]:
    chat = Chat(seed, keep_thinking=True, system=600)
    chat.say("user", 50, 100)
    for _ in range(10):
        yield chat.turn(thinking=20, low=20, high=60)
        chat.say("tool", 100, 800)


def shortened_answer(seed: int) -> Iterator[Turn]:
    """A 700-token answer, then histories that keep 95, 70, 45, 20 and 8 % of it and ask for more."""
    chat = Chat(seed)
    chat.say("user", 20, 200)
    first = chat.turn(thinking=0, low=700, high=700)
    yield first
    for percent in (95, 70, 45, 20, 8):
        kept = [*first.prompt, *first.answer[: len(first.answer) * percent // 100]]
        question, _ = render([Message("user", chat.words(chat.random.randint(20, 60)))], False)
        tail = [END, NEWLINE, *question, START, ROLES["assistant"], NEWLINE, THINK, NEWLINE]
        starts = [len(kept) + 2, len(kept) + len(tail) - 5, len(kept) + len(tail) - 2]
        yield Turn(kept + tail, [*first.boundaries, *starts], chat.words(60))


WORKLOADS: dict[str, Callable[[int], Iterator[Turn]]] = {
    f.__name__: f for f in (exact_append, thinking_stripped, regenerate, edit_in_the_middle, agent_loop)
}
