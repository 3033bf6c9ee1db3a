"""Histories of chats as data: operations of users, random histories, and the shrinking of a failing one.

A history holds no tokens: text comes from each operation's own seed, so that an operation means the same
after others were taken away. A history prints as Python that can be pasted into a test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeAlias

Ending: TypeAlias = Literal["close", "abandon", "stop", "interrupt", "processor error"]
"""Ends of a request: its generator is closed, left open half-way, stopped by a criterion, interrupted by
Ctrl-C between two tokens, or met by an exception inside a logits processor."""

ENDINGS: tuple[Ending, ...] = ("close", "abandon", "stop", "interrupt", "processor error")


@dataclass(frozen=True)
class Vocabulary:
    """The token ids a history may write."""

    size: int
    openers: tuple[int, ...] = ()
    """Control tokens: a message starts with one of them."""

    def text(self, count: int, seed: int) -> list[int]:
        """`count` random tokens, a message opener first where there is one."""
        rng = random.Random(seed)
        tokens = [rng.randrange(self.size) for _ in range(count)]
        if self.openers and tokens:
            tokens[0] = rng.choice(self.openers)
        return tokens


@dataclass(frozen=True)
class Append:
    """The chat goes on: everything so far, then a new message."""

    new: int
    seed: int


@dataclass(frozen=True)
class Strip:
    """As Append, but the first `percent` of the last answer (its thinking) is gone from the history."""

    percent: int
    new: int
    seed: int


@dataclass(frozen=True)
class Edit:
    """`new` tokens in the middle of the prompt are written anew; what follows them stays."""

    percent: int
    new: int
    seed: int


@dataclass(frozen=True)
class Cut:
    """Only the first `percent` of everything so far."""

    percent: int


@dataclass(frozen=True)
class Again:
    """The prompt of the request `back` requests ago, exactly (0: the last one, regenerated)."""

    back: int


@dataclass(frozen=True)
class Unrelated:
    """Another user's chat."""

    new: int
    seed: int


Prompt: TypeAlias = Append | Strip | Edit | Cut | Again | Unrelated


@dataclass
class Chat:
    """The last prompt and answer, and earlier prompts."""

    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    earlier: list[list[int]] = field(default_factory=list)

    def asked(self, prompt: list[int], answer: list[int]) -> None:
        """Note a request."""
        self.prompt, self.answer = prompt, answer
        self.earlier.append(prompt)

    def next(self, prompt: Prompt, vocabulary: Vocabulary) -> list[int]:
        """The tokens of the next prompt."""
        whole = self.prompt + self.answer
        match prompt:
            case Append(new, seed):
                return whole + vocabulary.text(new, seed)
            case Strip(percent, new, seed):
                kept = self.answer[len(self.answer) * percent // 100 :]
                return self.prompt + kept + vocabulary.text(new, seed)
            case Edit(percent, new, seed):
                at = len(self.prompt) * percent // 100
                return self.prompt[:at] + vocabulary.text(new, seed) + self.prompt[at + new :]
            case Cut(percent):
                return whole[: len(whole) * percent // 100]
            case Again(back):
                return list(self.earlier[max(0, len(self.earlier) - 1 - back)]) if self.earlier else []
            case Unrelated(new, seed):
                return vocabulary.text(new, seed)


def random_prompt(rng: random.Random, new: Callable[[], int], seed: int) -> Prompt:
    """One of the prompts that chats have; `new()`: tokens of a new message."""
    prompts: tuple[Callable[[], Prompt], ...] = (
        lambda: Append(new(), seed),
        lambda: Append(new(), seed),
        lambda: Strip(rng.choice((30, 70, 100)), new(), seed),
        lambda: Strip(rng.choice((30, 70, 100)), new(), seed),
        lambda: Edit(rng.randint(0, 95), new(), seed),
        lambda: Cut(rng.randint(5, 99)),
        lambda: Again(0),
        lambda: Again(rng.randint(1, 5)),
        lambda: Unrelated(max(20, new()), seed),
    )
    return rng.choice(prompts)()


@dataclass(frozen=True)
class Ask:
    """A request: `generate(prompt)`, of which `take` tokens are taken."""

    prompt: Prompt
    take: int
    end: Ending = "close"


@dataclass(frozen=True)
class Continue:
    """`generate(new text, reset=False)`: on top of whatever the context holds."""

    new: int
    seed: int
    take: int


@dataclass(frozen=True)
class Eval:
    """`eval(new text)`."""

    new: int
    seed: int


@dataclass(frozen=True)
class Do:
    """`reset()`; `save_state()`, of which the last one is kept; `load_state()` of that, if there is any.

    Or generators that were left hanging are closed now, requests later (collect).
    """

    what: Literal["reset", "save", "load", "collect"]


@dataclass(frozen=True)
class Switch:
    """Another of the conversations that share the model goes on."""

    chat: int


@dataclass(frozen=True)
class Budget:
    """The prompt cache gets this many KiB of RAM."""

    kib: int


@dataclass(frozen=True)
class Reopen:
    """The model is closed, and opened again with the same prompt cache."""

    restart: bool = False
    """With a new prompt cache on the same folder, as a new process would."""


CHATS = 3

Operation: TypeAlias = Ask | Continue | Eval | Do | Switch | Budget | Reopen


@dataclass(frozen=True)
class History:
    """Operations in the order in which they happen."""

    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        body = "".join(f"        {operation!r},\n" for operation in self.operations)
        return f"History(\n    operations=(\n{body}    )\n)"


def random_history(seed: int, *, length: int = 8, longest: int = 200) -> History:
    """A history of `length` operations; messages of 1 to `longest` / 2 tokens, the first prompt longer.

    The same seed gives the same history on every machine.
    """
    rng = random.Random(seed)
    opening = Ask(Unrelated(rng.randint(min(20, longest), longest), rng.randrange(10**6)), rng.randint(1, 12))
    return History((opening, *(_operation(rng, longest) for _ in range(length - 1))))


def restarted(history: History) -> History:
    """Return the history with a new process' model and cache before every operation but the first."""
    first, *others = history.operations
    return History((first, *(each for other in others for each in (Reopen(restart=True), other))))


def _operation(rng: random.Random, longest: int) -> Operation:
    def new() -> int:
        return rng.choice((1, 2, rng.randint(3, 30), rng.randint(3, max(3, longest // 2))))

    seed, take = rng.randrange(10**6), rng.choice((1, 2, rng.randint(3, 24)))
    kind = rng.random()
    if kind < 0.15:
        return Switch(rng.randrange(CHATS))
    if kind < 0.75:
        end = rng.choice(ENDINGS) if rng.random() < 0.4 else "close"
        return Ask(random_prompt(rng, new, seed), take, end)
    choices: tuple[Operation, ...] = (
        Continue(new(), seed, take),
        Eval(new(), seed),
        Do("reset"),
        *(Do("save"), Do("save"), Do("load"), Do("load")),
        Do("collect"),
        Budget(rng.choice((20, 60, 200, 100_000))),
        Reopen(),
        Reopen(restart=True),
        Reopen(restart=True),
    )
    return rng.choice(choices)


def shrink(history: History, fails: Callable[[History], bool], *, attempts: int = 200) -> History:
    """The history with the fewest operations found in `attempts` trials that still fails."""
    operations, size = history.operations, len(history.operations) // 2
    while size:
        starts = range(0, len(operations), size)
        fewer = (History(operations[:start] + operations[start + size :]) for start in starts)
        for candidate in islice(fewer, attempts):
            attempts -= 1
            if fails(candidate):
                operations, size = candidate.operations, len(candidate.operations)
                break
        size //= 2
    return History(operations)
