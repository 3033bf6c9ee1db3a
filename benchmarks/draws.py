"""Losses of the checkpoint schedule: tokens decoded over the least possible, conversations of random sizes.

Raw tokens: no marks show where messages start. First prompts have 64 to 32,768 tokens, histories part 4 to
4,096 tokens before a prompt's end (both log-uniform: no length is the usual one), 8 to 16 requests; requests
that have nothing to reuse are left out, the first divergence counts. Tokens alone are played, at the costs of
a Qwen3.5-architecture model of about 100M parameters, or where a cut takes the time of `--cut` tokens (7
with that model in f16 on two cores, by hand). "time" is the tokens decoded and the tokens that cuts take,
over the least tokens of all requests. `--longest` caps first prompts; say so with figures.
Run: python -m benchmarks.draws [--draws N] [--first SEED] [--longest N] [--cut TOKENS]
Exits with 1 where the bounds are missed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.figures import machine
from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.oracle import common_prefix, least_decodes
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.prompt_cache import Costs
from llamahybrid.prompt_cache.placement import cut_tokens
from tests.lab.in_process import Record
from tests.lab.pretend import Ours, PretendSpeech, Scale, play

MEAN, MOST = 1.06, 1.15
NAMED = 1.06
COSTS = Costs(token_seconds=18.6e-3, prefill_seconds=4.4e-3, snapshot_seconds=1e-3, restore_seconds=1e-3)
"""Costs of the 100M model on one core of a busy machine."""
RAM = 4 << 30

DISTANCE = 4, 4096
REQUESTS = 8, 16
ANSWER = 8, 96
REPLY = 4, 16
"""Tokens that ask for an answer, last in a prompt; where thinking is stripped, histories part before them."""

Start = Callable[[Speech], Conversation]


class Dice(random.Random):
    """Draws sizes from one seed."""

    longest = 32_768

    def log(self, low: int, high: int) -> int:
        """Log-uniform within `low` and `high`."""
        return round(math.exp(self.uniform(math.log(low), math.log(max(low, high)))))

    def about(self, n: int) -> int:
        """Within a third of `n`, at least 4."""
        return max(4, round(n * self.uniform(2 / 3, 4 / 3)))

    def prompt(self) -> int:
        """A prompt's length."""
        return self.log(64, self.longest)

    def distance(self, length: int) -> int:
        """Return the distance between the parting of histories and the end of a prompt of `length` tokens."""
        return self.log(DISTANCE[0], min(DISTANCE[1], length - DISTANCE[0]))


def questions(dice: Dice, speech: Speech) -> Conversation:
    """A text with another question each time: a system prompt of many users, or a document."""
    length = dice.prompt()
    asked = dice.distance(length)
    text = speech.words(length - asked)
    for _ in range(dice.randint(*REQUESTS)):
        yield Request(dice.log(*ANSWER), text + speech.words(dice.about(asked)))


def few_shot(dice: Dice, speech: Speech) -> Conversation:
    """Worked examples and a question about as long as one of them; some batches use only the first ones."""
    length = dice.prompt()
    size = max(DISTANCE[0], min(DISTANCE[1], length // (dice.log(2, 32) + 1)))
    shots = max(1, length // size - 1)
    examples = [speech.words(dice.about(size)) for _ in range(shots)]
    answers = dice.log(*ANSWER)
    fewer = dice.randint(1, shots) if dice.random() < 0.3 else shots
    for i in range(dice.randint(*REQUESTS)):
        used = examples if i % 2 == 0 else examples[:fewer]
        yield Request(dice.about(answers), [t for e in used for t in e] + speech.words(dice.about(size)))


def users(dice: Dice, speech: Speech) -> Conversation:
    """Chats in turn on a system prompt, own or shared; histories keep all of an answer or its end."""
    chats = dice.randint(2, 8)
    length, said, answer = dice.prompt(), dice.log(8, 512), dice.log(*ANSWER)
    reply, spoken = speech.words(dice.log(*REPLY)), speech.words(2)
    system = speech.words(length)
    shared, strips = dice.random() < 0.5, dice.random() < 0.5
    histories = [list(system) if shared else speech.words(length) for _ in range(chats)]
    for turn in range(dice.randint(*REQUESTS)):
        history = histories[turn % chats]
        history += speech.words(dice.about(said))
        got = yield Request(answer, history + reply)
        kept = list(got.tokens)
        history += spoken + kept[len(kept) // 2 :] if strips else reply + kept


def edits(dice: Dice, speech: Speech) -> Conversation:
    """A chat that goes on, one to three of whose prompts leave the one before at a random distance."""
    length, said, answer = dice.prompt(), dice.log(8, 512), dice.log(*ANSWER)
    requests = dice.randint(*REQUESTS)
    edited = {dice.randint(1, requests - 1) for _ in range(dice.randint(1, 3))}
    prompt = speech.words(length)
    for turn in range(requests):
        if turn in edited:
            at = len(prompt) - dice.distance(len(prompt))
            prompt = prompt[:at] + speech.words(dice.about(len(prompt) - at))
        got = yield Request(answer, prompt)
        if turn + 1 not in edited:
            prompt = [*prompt, *got.tokens, *speech.words(dice.about(said))]


def retries(dice: Dice, speech: Speech) -> Conversation:
    """Prompts that leave one another at the same few places, again and again: a text that is worked on."""
    length, answer = dice.prompt(), dice.log(*ANSWER)
    text = speech.words(length)
    places = [length - dice.distance(length) for _ in range(dice.randint(1, 2))]
    yield Request(answer, text)
    for _ in range(dice.randint(*REQUESTS) - 1):
        at = places[dice.randrange(len(places))]
        yield Request(answer, text[:at] + speech.words(dice.about(length - at)))


SHAPES = (questions, few_shot, users, edits, retries)


def shared(text: int, question: int, requests: int, answer: int) -> Start:
    """Questions of one length on a text of another."""

    def conversation(speech: Speech) -> Conversation:
        prefix = speech.words(text)
        for _ in range(requests):
            yield Request(answer, prefix + speech.words(question))

    return conversation


def in_turn(speech: Speech) -> Conversation:
    """Four users whose histories keep half of each answer."""
    histories = [speech.words(150) for _ in range(4)]
    reply = speech.words(5)
    for turn in range(20):
        history = histories[turn % 4]
        history += speech.words(50)
        got = yield Request(60, history + reply)
        history += [*reply[:3], *got.tokens[30:]]


def left(speech: Speech) -> Conversation:
    """Prompts that part near the end of the first one."""
    text = speech.words(350)
    yield Request(24, text)
    yield Request(24, text[:330] + speech.words(20))
    yield Request(24, text[:330] + speech.words(40))


CASES: dict[str, Start] = {
    "8 chats on 1,200 shared tokens, questions of 80": shared(1200, 80, 8, 40),
    "16 few-shot prompts, questions of 40": shared(6 * 110, 40, 16, 16),
    "four raw users in turn": in_turn,
    "a prompt that leaves the last one 20 tokens before its end": left,
}
"""Sizes at which a schedule for other lengths was found wanting."""


def warm(records: Sequence[Record]) -> Iterator[int]:
    """Numbers of the requests that have anything to reuse: all others cost everybody the same."""
    seen: list[tuple[int, ...]] = []
    for number, record in enumerate(records):
        if any(common_prefix(record.prompt, other) >= min(len(record.prompt), DISTANCE[0]) for other in seen):
            yield number
        seen.append(record.prompt)


def ratio(records: Sequence[Record]) -> float:
    """Tokens decoded over the least possible, of the requests of one conversation that had what to reuse."""
    least, counted = least_decodes(records), list(warm(records))
    needed = sum(least[i] for i in counted)
    return sum(records[i].decoded for i in counted) / needed if needed else 1.0


class Played(NamedTuple):
    """Losses of one conversation."""

    tokens: float
    """See `ratio`."""
    time: float
    """Tokens decoded, and the time of cuts in tokens, over the least tokens of all requests."""
    seed: int = 0


def played(start: Start, costs: Costs, seed: int = 0) -> Played:
    """Play a conversation."""
    scale = Scale(1536 << 10, 4 << 10, costs, vocabulary=256, divisor=8)
    speech, ours = PretendSpeech(marked=False), Ours(scale, RAM)
    records = list(play(start(speech), speech, ours))
    spent = sum(record.decoded for record in records) + ours.engine.cuts * cut_tokens(costs)
    return Played(ratio(records), spent / sum(least_decodes(records)), seed)


def percentile(ratios: Sequence[float], share: float = 0.95) -> float:
    return sorted(ratios)[min(len(ratios) - 1, int(share * len(ratios)))]


def main(costs: Costs, seeds: range, longest: int) -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    found: dict[str, list[Played]] = {shape.__name__: [] for shape in SHAPES}
    for seed in track(seeds, console=Console(stderr=True)):
        shape, dice = SHAPES[seed % len(SHAPES)], Dice(seed)
        dice.longest = longest
        one = played(partial(shape, dice), costs, seed)
        found[shape.__name__].append(one)
        console.print(f"[dim]{seed} {shape.__name__} {one.tokens:.3f} {one.time:.3f}[/]")
    cases = {name: played(start, costs).tokens for name, start in CASES.items()}
    every = found["all"] = [each for some in found.values() for each in some]
    table = Table("shape", "draws", "mean", "95 %", "worst", "its seed", "time")
    for name, some in found.items():
        ratios = [one.tokens for one in some] or [1.0]
        worst = max(some, default=Played(1.0, 1.0))
        cells = f"{fmean(ratios):.4f}", f"{percentile(ratios):.4f}", f"{worst.tokens:.4f}", str(worst.seed)
        table.add_row(name, str(len(some)), *cells, f"{fmean([one.time for one in some] or [1.0]):.4f}")
    console.print(table)
    for name, value in cases.items():
        console.print(f"{name}: {value:.3f}")
    console.print(f"seeds {seeds.start} to {seeds.stop - 1}. {machine()}", style="dim")
    ratios = [one.tokens for one in every]
    holds = fmean(ratios) <= MEAN and percentile(ratios) <= MOST and max(cases.values()) <= NAMED
    return 0 if holds else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=10_000, help="seeds below 10,000 chose the rules")
    parser.add_argument("--longest", type=int, default=Dice.longest)
    parser.add_argument("--cut", type=float, help="tokens of a prefill that a cut takes")
    given = parser.parse_args()
    costs = COSTS
    if given.cut is not None:
        batch = given.cut * COSTS.prefill_seconds - COSTS.snapshot_seconds
        costs = replace(COSTS, batch_seconds=batch)
    sys.exit(main(costs, range(given.first, given.first + given.draws), given.longest))
