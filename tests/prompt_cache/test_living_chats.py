"""A conversation that goes on keeps its place beside requests that nobody repeats, within one budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from llamahybrid.prompt_cache import Costs, PromptCache
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity
from tests.lab.pretend import PretendSpeech

DRAWS = 16
MEASURED = Costs(
    token_seconds=4e-3, prefill_seconds=1e-3, snapshot_seconds=1e-4, restore_seconds=1e-4, batch_seconds=2e-3
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one draw, in tokens unless they say otherwise."""

    turns: int
    jobs: int
    """Other requests between two turns."""
    system: int
    question: int
    answer: int
    thinking: bool
    job: int
    instruction: int
    snapshot_bytes: int
    token_bytes: int
    room: float
    """The budget, in sizes of the chat."""

    @classmethod
    def drawn(cls, seed: int) -> Sizes:
        draw = random.Random(seed)
        return cls(
            turns=draw.randint(6, 14),
            jobs=draw.randint(2, 6),
            system=draw.choice([200, 800, 2000]),
            question=draw.choice([20, 80, 300]),
            answer=draw.choice([30, 100, 400]),
            thinking=draw.random() < 0.6,
            job=draw.choice([200, 650, 1500, 2500]),
            instruction=draw.choice([4, 60, 400]),
            snapshot_bytes=draw.choice([1 << 16, 1 << 18]),
            token_bytes=draw.choice([64, 512, 1024]),
            room=draw.choice([1.15, 1.3]),
        )

    def engine(self, cache: PromptCache, namespace: str) -> FakeEngine:
        costs = replace(MEASURED, snapshot_bytes=self.snapshot_bytes)
        sizes = {"snapshot_bytes": self.snapshot_bytes, "token_bytes": self.token_bytes}
        return FakeEngine(cache, "hybrid", namespace, costs, **sizes)  # type: ignore[arg-type]


def words(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(2, 50_000) for _ in range(n)]


def chat(engine: FakeEngine, sizes: Sizes, seed: int) -> Iterator[int]:
    """Prompt tokens that each turn decodes."""
    draw, speech = random.Random(seed), PretendSpeech(seed)
    history = speech.message(sizes.system, "system")
    for _ in range(sizes.turns):
        history += speech.message(sizes.question)
        prompt, answer = history + speech.reply(thinking=sizes.thinking), words(draw, sizes.answer)
        before = engine.prefilled
        engine.request(prompt, speech.starts(prompt), answer)
        yield engine.prefilled - before
        history += speech.reply() + answer[len(answer) // 2 if sizes.thinking else 0 :]


Others = Callable[[FakeEngine, PromptCache, Sizes, random.Random], Callable[[], None]]
"""Makes the requests between two turns; given the chat's engine."""


def another_model(_: FakeEngine, cache: PromptCache, sizes: Sizes, draw: random.Random) -> Callable[[], None]:
    """Jobs of another model on the same budget, each of another text."""
    helper = sizes.engine(cache, "helper")

    def jobs() -> None:
        for _ in range(sizes.jobs):
            helper.request(words(draw, sizes.job), answer=words(draw, 8))

    return jobs


def titles(chat: FakeEngine, _: PromptCache, sizes: Sizes, draw: random.Random) -> Callable[[], None]:
    """Titles and summaries by the chat's own model: one instruction, other texts."""
    instruction = words(draw, sizes.instruction)

    def jobs() -> None:
        for _ in range(sizes.jobs):
            chat.request(instruction + words(draw, sizes.job), answer=words(draw, 8))

    return jobs


def autocomplete(_: FakeEngine, cache: PromptCache, sizes: Sizes, draw: random.Random) -> Callable[[], None]:
    """A file grows before the cursor, the same text follows behind it; a new file now and then."""
    helper, file, rest = sizes.engine(cache, "coder"), words(draw, sizes.job), words(draw, 200)

    def jobs() -> None:
        if draw.random() < 0.3:
            file[:] = words(draw, sizes.job)
        for _ in range(sizes.jobs):
            file.extend(words(draw, draw.randint(1, 20)))
            helper.request(file + rest, answer=words(draw, 8))

    return jobs


def embeddings(chat: FakeEngine, _: PromptCache, sizes: Sizes, draw: random.Random) -> Callable[[], None]:
    """Vectors of the chat's own model: what was live is gone, and nothing is stored."""

    def jobs() -> None:
        chat.state, chat.logits = [], None

    return jobs


def played(sizes: Sizes, others: Others | None, budget: int, seed: int) -> tuple[int, PromptCache]:
    """Prompt tokens that a chat decodes from its second turn on."""
    cache = PromptCache(budget)
    engine = sizes.engine(cache, "chat")
    between = None if others is None else others(engine, cache, sizes, random.Random(seed))
    decoded = []
    for left in chat(engine, sizes, seed):
        decoded.append(left)
        if between is not None:
            between()
    check_integrity(cache)
    return sum(decoded[1:]), cache


@pytest.mark.parametrize("others", [another_model, titles, autocomplete, embeddings])
def test_requests_that_nobody_repeats_leave_a_living_chat_alone(others: Others) -> None:
    """Of random sizes: four of five draws decode at most half as much again as the chat alone."""
    ratios = []
    for seed in range(DRAWS):
        sizes = Sizes.drawn(seed)
        alone, cache = played(sizes, None, 1 << 30, seed)
        budget = int(sizes.room * cache.stats().bytes_ram)
        ratios.append(played(sizes, others, budget, seed)[0] / alone)
    assert sorted(ratios)[4 * DRAWS // 5] <= 1.5, [round(r, 2) for r in ratios]
