"""Conversations of random sizes, as bare tokens: no schedule can know their lengths beforehand.

A draw is a shape of use with all its sizes drawn: first prompts of 64 to 32,768 tokens, histories part 4
to 4,096 tokens before a prompt's end (both log-uniform: no length is the usual one), 8 to 16 requests. No
marks show where messages start.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.oracle import common_prefix, least_decodes
from tests.lab.in_process import Record

PROMPT = 64, 32_768
DISTANCE = 4, 4096
REQUESTS = 8, 16
ANSWER = 8, 96
REPLY = 4, 16
"""Tokens that ask for an answer, last in a prompt; where thinking is stripped, histories part before them."""


class Words(Protocol):
    """A source of random words."""

    def words(self, n: int) -> list[int]:
        """`n` ordinary tokens."""
        ...


class Dice:
    """Draws sizes from one seed."""

    def __init__(self, seed: int, longest: int = PROMPT[1]) -> None:
        self._random = random.Random(seed)
        self._longest = longest

    def log(self, low: int, high: int) -> int:
        """Log-uniform within `low` and `high`."""
        return round(math.exp(self._random.uniform(math.log(low), math.log(max(low, high)))))

    def about(self, n: int) -> int:
        """Within a third of `n`, at least 4."""
        return max(4, round(n * self._random.uniform(2 / 3, 4 / 3)))

    def count(self, low: int, high: int) -> int:
        """Uniform within `low` and `high`."""
        return self._random.randint(low, high)

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return self._random.random() < share

    def one_of(self, n: int) -> int:
        """Return a number of range(n)."""
        return self._random.randrange(n)

    def prompt(self) -> int:
        """A prompt's length."""
        return self.log(PROMPT[0], self._longest)

    def distance(self, length: int) -> int:
        """Return the distance between the parting of histories and the end of a prompt of `length` tokens."""
        return self.log(DISTANCE[0], min(DISTANCE[1], length - DISTANCE[0]))


def questions(dice: Dice, speech: Words) -> Conversation:
    """A text with another question each time: a system prompt of many users, or a document."""
    length = dice.prompt()
    asked = dice.distance(length)
    text = speech.words(length - asked)
    for _ in range(dice.count(*REQUESTS)):
        yield Request(dice.log(*ANSWER), text + speech.words(dice.about(asked)))


def few_shot(dice: Dice, speech: Words) -> Conversation:
    """Worked examples and a question about as long as one of them; some batches use only the first ones."""
    length = dice.prompt()
    size = max(DISTANCE[0], min(DISTANCE[1], length // (dice.log(2, 32) + 1)))
    shots = max(1, length // size - 1)
    examples = [speech.words(dice.about(size)) for _ in range(shots)]
    answers = dice.log(*ANSWER)
    fewer = dice.count(1, shots) if dice.chance(0.3) else shots
    for i in range(dice.count(*REQUESTS)):
        used = examples if i % 2 == 0 else examples[:fewer]
        yield Request(dice.about(answers), [t for e in used for t in e] + speech.words(dice.about(size)))


def users(dice: Dice, speech: Words) -> Conversation:
    """Chats in turn on a system prompt, own or shared; histories keep all of an answer or its end."""
    chats = dice.count(2, 8)
    length, said, answer = dice.prompt(), dice.log(8, 512), dice.log(*ANSWER)
    reply, spoken = speech.words(dice.log(*REPLY)), speech.words(2)
    system = speech.words(length)
    shared, strips = dice.chance(0.5), dice.chance(0.5)
    histories = [list(system) if shared else speech.words(length) for _ in range(chats)]
    for turn in range(dice.count(*REQUESTS)):
        history = histories[turn % chats]
        history += speech.words(dice.about(said))
        got = yield Request(answer, history + reply)
        kept = list(got.tokens)
        history += spoken + kept[len(kept) // 2 :] if strips else reply + kept


def edits(dice: Dice, speech: Words) -> Conversation:
    """A chat that goes on, one to three of whose prompts leave the one before at a random distance."""
    length, said, answer = dice.prompt(), dice.log(8, 512), dice.log(*ANSWER)
    requests = dice.count(*REQUESTS)
    edited = {dice.count(1, requests - 1) for _ in range(dice.count(1, 3))}
    prompt = speech.words(length)
    for turn in range(requests):
        if turn in edited:
            at = len(prompt) - dice.distance(len(prompt))
            prompt = prompt[:at] + speech.words(dice.about(len(prompt) - at))
        got = yield Request(answer, prompt)
        if turn + 1 not in edited:
            prompt = [*prompt, *got.tokens, *speech.words(dice.about(said))]


def retries(dice: Dice, speech: Words) -> Conversation:
    """Prompts that leave one another at the same few places, again and again: a text that is worked on."""
    length, answer = dice.prompt(), dice.log(*ANSWER)
    text = speech.words(length)
    places = [length - dice.distance(length) for _ in range(dice.count(1, 2))]
    yield Request(answer, text)
    for _ in range(dice.count(*REQUESTS) - 1):
        at = places[dice.one_of(len(places))]
        yield Request(answer, text[:at] + speech.words(dice.about(length - at)))


SHAPES: tuple[Callable[[Dice, Words], Conversation], ...] = (questions, few_shot, users, edits, retries)


@dataclass(frozen=True)
class Draw:
    """A conversation of the distribution; the same for the same seed."""

    seed: int
    longest: int = PROMPT[1]

    @property
    def shape(self) -> Callable[[Dice, Words], Conversation]:
        """Its shape of use."""
        return SHAPES[self.seed % len(SHAPES)]

    def start(self, speech: Words) -> Conversation:
        """The conversation, in words of `speech`."""
        return self.shape(Dice(self.seed, self.longest), speech)


def warm(records: Sequence[Record]) -> list[int]:
    """Numbers of the requests that have anything to reuse: all others cost everybody the same."""
    seen: list[tuple[int, ...]] = []
    found = []
    for number, record in enumerate(records):
        if any(common_prefix(record.prompt, other) >= min(len(record.prompt), DISTANCE[0]) for other in seen):
            found.append(number)
        seen.append(record.prompt)
    return found


def ratio(records: Sequence[Record]) -> float:
    """Tokens decoded over the least possible, of the requests of one conversation that had what to reuse."""
    least, counted = least_decodes(records), warm(records)
    needed = sum(least[i] for i in counted)
    return sum(records[i].decoded for i in counted) / needed if needed else 1.0


def named() -> Iterator[tuple[str, Callable[[Words], Conversation]]]:
    """The sizes at which a schedule for other lengths was found wanting."""

    def shared(text: int, question: int, requests: int, answer: int) -> Callable[[Words], Conversation]:
        def conversation(speech: Words) -> Conversation:
            prefix = speech.words(text)
            for _ in range(requests):
                yield Request(answer, prefix + speech.words(question))

        return conversation

    def in_turn(speech: Words) -> Conversation:
        histories = [speech.words(150) for _ in range(4)]
        reply = speech.words(5)
        for turn in range(20):
            history = histories[turn % 4]
            history += speech.words(50)
            got = yield Request(60, history + reply)
            history += [*reply[:3], *got.tokens[30:]]

    def left(speech: Words) -> Conversation:
        text = speech.words(350)
        yield Request(24, text)
        yield Request(24, text[:330] + speech.words(20))
        yield Request(24, text[:330] + speech.words(40))

    yield "8 chats on 1,200 shared tokens, questions of 80", shared(1200, 80, 8, 40)
    yield "16 few-shot prompts, questions of 40", shared(6 * 110, 40, 16, 16)
    yield "four raw users in turn", in_turn
    yield "a prompt that leaves the last one 20 tokens before its end", left
