"""Synthetic request traces of many conversations, as token arrays: what an eviction policy is judged on.

Lengths are log-normal, conversations come and go, and think times are heavy-tailed, as in chat services.
`load` is how many conversations are open at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

START, END, THINK = 1, 2, 3
FIRST_WORD, VOCABULARY = 10, 150_000


@dataclass(frozen=True, eq=False)
class Ask:
    """One request of a trace."""

    prompt: Tokens
    boundaries: tuple[int, ...]
    """Positions where a message, or the start of thinking, begins."""
    answer: Tokens


class Writer:
    """Draws message texts and times from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def words(self, n: int) -> Tokens:
        """`n` random words."""
        return self.rng.integers(FIRST_WORD, VOCABULARY, n, dtype=np.int32)

    def length(self, median: float, sigma: float, most: int) -> int:
        """A log-normal length within 4 and `most`."""
        return int(np.clip(self.rng.lognormal(np.log(median), sigma), 4, most))

    def message(self, median: float, sigma: float = 0.9, most: int = 6000) -> Tokens:
        """A message with its opening and closing tokens."""
        body = self.words(self.length(median, sigma, most))
        return np.concatenate([[START], body, [END]]).astype(np.int32)

    def pause(self) -> float:
        """Time until a conversation's next request; heavy-tailed."""
        return float(self.rng.lognormal(0.0, 1.0))

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return bool(self.rng.random() < share)


Conversation = Iterator[Ask]


@dataclass
class History:
    """Messages so far; an answer is asked for with an opening token and the start of thinking."""

    messages: list[Tokens] = field(default_factory=list)

    def ask(self, answer: Tokens) -> Ask:
        """The request that gets `answer`."""
        lengths = [len(m) for m in self.messages]
        ends = np.cumsum(lengths).tolist()
        opening = np.array([START, THINK], np.int32)
        prompt = np.concatenate([*self.messages, opening])
        return Ask(prompt, (*ends, ends[-1] + 1), answer)


def chat(writer: Writer, systems: list[Tokens]) -> Conversation:
    """A chat of a few turns; most models strip thinking from the history, some keep it.

    Now and then an answer is regenerated, or an earlier message reworded.
    """
    history = History([systems[writer.rng.integers(len(systems))]])
    strips = writer.chance(0.6)
    while True:
        history.messages.append(writer.message(120))
        thinking, reply = writer.message(250), writer.message(220)
        yield history.ask(np.concatenate([thinking, reply]))
        while writer.chance(0.08):
            reply = writer.message(220)
            yield history.ask(np.concatenate([thinking, reply]))
        opening = np.array([START, THINK], np.int32)
        history.messages.append(
            np.concatenate([opening[:1], reply] if strips else [opening, thinking, reply])
        )
        if len(history.messages) > 4 and writer.chance(0.05):
            del history.messages[2 * int(writer.rng.integers(1, len(history.messages) // 2)) - 1 :]
        if writer.chance(0.15):
            return


def agent(writer: Writer, systems: list[Tokens]) -> Conversation:
    """A loop of calls and observations; old observations are shortened, every few steps, to a stub."""
    history = History([systems[writer.rng.integers(len(systems))], writer.message(300)])
    recent, every = int(writer.rng.integers(3, 8)), int(writer.rng.integers(1, 5))
    observed: list[int] = []
    for step in range(int(writer.rng.integers(6, 30))):
        call = writer.message(120)
        yield history.ask(call)
        history.messages.append(np.concatenate([np.array([START, THINK], np.int32), call]))
        observed.append(len(history.messages))
        history.messages.append(writer.message(500, 1.1))
        if step % every == 0:
            for index in observed[:-recent]:
                history.messages[index] = np.array([START, index + FIRST_WORD, END], np.int32)
            del observed[:-recent]


def visitor(writer: Writer, systems: list[Tokens]) -> Conversation:
    """A user of one of a few long system prompts, popular ones far more often; one question or a few."""
    popularity = 1 / np.arange(1, len(systems) + 1)
    history = History([systems[writer.rng.choice(len(systems), p=popularity / popularity.sum())]])
    while True:
        history.messages.append(writer.message(60))
        reply = writer.message(150)
        yield history.ask(reply)
        history.messages.append(np.concatenate([np.array([START, THINK], np.int32), reply]))
        if writer.chance(0.5):
            return


@dataclass(frozen=True)
class Family:
    """A kind of traffic: its conversations, their system prompts, and how many are open at a time."""

    name: str
    conversation: Callable[[Writer, list[Tokens]], Conversation]
    systems: tuple[int, ...]
    """Median tokens of each system prompt."""
    loads: tuple[int, ...]

    def trace(self, seed: int, load: int, requests: int) -> list[Ask]:
        """The first `requests` requests of one seed."""
        writer = Writer(seed)
        systems = [writer.message(n, 0.3) for n in self.systems]
        due: list[tuple[float, int, Conversation]] = []
        for number in range(load):
            heapq.heappush(due, (writer.pause(), number, self.conversation(writer, systems)))
        trace: list[Ask] = []
        opened = load
        while len(trace) < requests:
            now, number, conversation = heapq.heappop(due)
            ask = next(conversation, None)
            if ask is None:
                conversation, number, opened = self.conversation(writer, systems), opened, opened + 1
                ask = next(conversation)
            trace.append(ask)
            heapq.heappush(due, (now + writer.pause(), number, conversation))
        return trace


FAMILIES = (
    Family("chats", chat, (150, 500, 900), (3, 8, 20)),
    Family("agents", agent, (2500, 1200), (2, 4, 10)),
    Family("crowd", visitor, (3500, 2500, 2000, 1500), (4, 12, 30)),
)
