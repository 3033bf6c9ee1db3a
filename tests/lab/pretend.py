"""Workloads without a model: tokens that would be decoded at sizes that nothing here could hold.

The answers are made up, the same at every size: all see the same conversations.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamahybrid.harness.conversation import Answer, Conversation, Request
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from llamahybrid.prompt_cache import Costs, PromptCache
from llamahybrid.prompt_cache.eviction import Eviction
from tests.lab.fake_engine import FakeEngine, Kind
from tests.lab.in_process import Record, played

OPENING, THINK = 0, 1
FIRST_WORD, WORDS = 2, 50_000


class PretendSpeech(Speech):
    """Speech of a vocabulary of its own."""

    def __init__(self, seed: int = 0, marked: bool = True) -> None:
        words = tuple(range(FIRST_WORD, FIRST_WORD + WORDS))
        super().__init__(Vocabulary(words, OPENING, THINK, (OPENING, THINK)), seed, marked)
        self.marked = marked

    def starts(self, prompt: Sequence[int]) -> list[int]:
        """Return the starts of messages and of marked parts of them, without the prompt's first token."""
        ids = np.array(prompt)
        return np.flatnonzero(np.isin(ids, (OPENING, THINK)))[1:].tolist() if self.marked else []


@dataclass(frozen=True)
class Scale:
    """A model's sizes and costs; all bytes are divided by `divisor`, so that a test can hold them."""

    snapshot: int
    token: int
    """Attention KV of a token."""
    costs: Costs
    vocabulary: int
    divisor: int

    def bytes(self, n: float) -> int:
        """`n` real bytes, as many as stand for them here."""
        return int(n) // self.divisor


QWEN36_27B = Scale(
    snapshot=150 << 20,
    token=64 << 10,
    costs=Costs(token_seconds=0.2, prefill_seconds=0.03, snapshot_seconds=0.03, restore_seconds=0.03),
    vocabulary=248_320,
    divisor=64,
)
"""150 MiB a snapshot and 64 KiB of attention KV a token, on a CPU that decodes 5 tokens a second, reads 33
and copies 5 GB."""


class Ours:
    """This library's cache and placement within `ram_bytes` real bytes, on the fake engine."""

    def __init__(
        self, scale: Scale, ram_bytes: float, kind: Kind = "hybrid", eviction: Eviction | None = None
    ) -> None:
        snapshot, cache = scale.bytes(scale.snapshot), PromptCache(scale.bytes(ram_bytes))
        if eviction is not None:
            cache.eviction = eviction
        self.engine = FakeEngine(
            cache,
            kind,
            costs=replace(scale.costs, snapshot_bytes=snapshot),
            snapshot_bytes=snapshot,
            token_bytes=scale.bytes(scale.token),
            vocabulary=scale.vocabulary // scale.divisor,
        )

    def ask(self, speech: PretendSpeech, prompt: Sequence[int], answer: Sequence[int]) -> int:
        before = self.engine.prefilled
        self.engine.request(prompt, speech.starts(prompt), answer[:-1])
        return self.engine.prefilled - before + len(answer) - 1


def play(conversation: Conversation, speech: PretendSpeech, ours: Ours) -> Iterator[Record]:
    """Run a conversation to its end, one record for each request."""

    def ask(request: Request) -> tuple[Record, Answer]:
        prompt = tuple(request.tokens)
        answer = made_up(prompt, request.max_tokens, request.seed)
        return Record(prompt, answer, ours.ask(speech, prompt, answer)), Answer(answer, str)

    return played(conversation, ask)


def interleaved(
    starts: Sequence[Callable[[Speech], Conversation]], speech: PretendSpeech, ours: Ours
) -> Iterator[Record]:
    """Run conversations side by side, a request of each in turn."""
    running = [play(start(speech), speech, ours) for start in starts]
    while running:
        for conversation in list(running):
            record = next(conversation, None)
            if record is None:
                running.remove(conversation)
            else:
                yield record


def made_up(prompt: Sequence[int], n: int, seed: int | None) -> tuple[int, ...]:
    """An answer of `n` words that depends on the prompt and the seed alone."""
    rng = np.random.default_rng(
        [zlib.crc32(np.array(prompt, np.int32).tobytes()), 0 if seed is None else seed]
    )
    return tuple(rng.integers(FIRST_WORD, FIRST_WORD + WORDS, n).tolist())
