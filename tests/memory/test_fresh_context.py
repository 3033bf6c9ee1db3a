"""The seam of memory: whatever was done before, the logits behind given tokens are a fresh context's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.errors import DecodeError, SnapshotError
from llamahybrid.memory.restore import restore
from tests.lab.reference import SETTINGS, Reference, Setting, difference

from .conftest import foreign_decode, ids, new, sequences

pytestmark = [pytest.mark.patched]

WINDOW = next(setting for setting in SETTINGS if setting.name == "window")
FLASH = next(setting for setting in SETTINGS if setting.name == "flash attention")
DEFAULT = SETTINGS[0]
PIECE = 24
"""Most tokens of one batch: below every setting's n_batch."""


@dataclass
class Stored:
    """State from which a sequence is restored to `tokens`."""

    tokens: list[int]
    record: Any
    segments: list[Any]


@dataclass
class Walk:
    """Random operations on the sequences of one context, each checked against a fresh one."""

    llm: Any
    reference: Reference
    tolerance: float
    chance: random.Random
    expected: dict[int, list[int] | None] = field(default_factory=dict)
    """The tokens of each sequence; None: unknown, until it is emptied or restored."""
    stored: list[Stored] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lives = sequences(self.llm)
        self.expected = {i: [] for i in range(len(self.lives))}

    def text(self, n: int) -> list[int]:
        return [self.chance.randrange(1, 200) for _ in range(n)]

    def decode(self, i: int, tokens: list[int]) -> Any:
        """Append tokens; the logits behind them."""
        live = self.lives[i]
        for start in range(0, len(tokens), PIECE):
            live.decode(ids(tokens[start : start + PIECE]), "last")
        known = self.expected[i]
        assert known is not None
        known += tokens
        return live.row.logits().copy()

    def step(self, name: str, i: int) -> None:
        """Run an operation on sequence `i`; with unknown content, one that makes it known."""
        if self.expected[i] is None and name not in ("empty", "restore"):
            name = self.chance.choice(["empty", "restore"])
        getattr(self, name)(i)
        self.done.add(name)
        for live, tokens in zip(self.lives, self.expected.values(), strict=True):
            assert (live.fault() is None) is (tokens is not None), name
            assert tokens is None or live.tokens.tolist() == tokens, name

    def check(self, i: int) -> None:
        tokens = self.expected[i]
        if tokens is None:
            return
        ours = self.decode(i, self.text(1))
        assert difference(ours, self.reference.logits(tokens)[0]) <= self.tolerance

    # -- operations ----------------------------------------------------------------------------------

    def append(self, i: int) -> None:
        self.decode(i, self.text(self.chance.choice((1, 2, 9, 40))))

    def cut(self, i: int) -> None:
        tokens = self.expected[i]
        assert tokens is not None
        position = max(0, len(tokens) - self.chance.choice((1, 2, 3, 15, 60)))
        if self.lives[i].cut(position):
            self.done.add("exact cut")
            del tokens[position:]

    def empty(self, i: int) -> None:
        self.lives[i].empty()
        self.expected[i] = []

    def save(self, i: int) -> None:
        live, tokens = self.lives[i], self.expected[i]
        assert tokens is not None
        if not tokens:
            return
        record = None if live.profile.attention_is_all else live.snapshot(new)
        borders = sorted({0, *self.chance.sample(range(len(tokens)), min(2, len(tokens))), len(tokens)})
        segments = []
        if live.profile.pager is not None:
            segments = [live.page_out(a, b, new) for a, b in itertools.pairwise(borders)]
            assert None not in segments
            self.done.add("page out")
        assert record is not None or live.profile.attention_is_all
        self.stored.append(Stored(list(tokens), record, segments))

    def restore(self, i: int) -> None:
        if not self.stored:
            self.empty(i)
            return
        live, chosen = self.lives[i], self.chance.choice(self.stored)
        there = live.tokens.tolist()
        same = next(
            (n for n, (a, b) in enumerate(zip(there, chosen.tokens, strict=False)) if a != b),
            min(len(there), len(chosen.tokens)),
        )
        kept = max((s.start for s in chosen.segments if s.start <= same), default=0)
        segments = [s for s in chosen.segments if s.start >= kept]
        try:
            fault = restore(live, chosen.record, ids(chosen.tokens), segments, kept)
        except SnapshotError:
            assert live.profile.needs_attention
            assert not chosen.segments
            assert same < len(chosen.tokens)
            return
        assert fault is None
        self.expected[i] = list(chosen.tokens)

    def foreign(self, i: int) -> None:
        """Another caller decodes on the context: nothing in it is known any more."""
        if not self.lives[i].n:
            return
        foreign_decode(self.llm, [5], self.lives[i].n, self.lives[i].native.seq)
        assert self.lives[0].shared.look() is not None
        for k in self.expected:
            self.empty(k)

    def stopped(self, i: int) -> None:
        """A batch that ends in the middle."""
        polls, after = itertools.count(), self.chance.randrange(40)

        @llama_cpp.ggml_abort_callback
        def abort(_: Any) -> bool:
            return next(polls) >= after

        llama_cpp.llama_set_abort_callback(self.llm.ctx, abort, None)
        try:
            self.decode(i, self.text(PIECE))
        except DecodeError:
            self.expected[i] = None
            self.done.add("aborted")
        finally:
            llama_cpp.llama_set_abort_callback(self.llm.ctx, llama_cpp.ggml_abort_callback(0), None)

    def together(self, i: int) -> None:
        """Decode a token of each sequence, in one batch."""
        ready = [k for k, tokens in self.expected.items() if tokens]
        if len(ready) < 2:
            return
        tokens = self.text(len(ready))
        faults = self.lives[0].shared.decode_parts(
            [(self.lives[k], (token,), "last") for k, token in zip(ready, tokens, strict=True)]
        )
        assert faults == [None] * len(ready)
        rows = [self.lives[k].row.logits().copy() for k in ready]
        for k, token, row in zip(ready, tokens, rows, strict=True):
            known = self.expected[k]
            assert known is not None
            known.append(token)
            assert difference(row, self.reference.logits(known)[0]) <= self.tolerance

    def zero(self, i: int) -> None:
        """The buffers hold NaN: they are zeroed for one sequence, and what the others held is gone."""
        self.lives[i].require_zeroing()
        self.lives[i].empty()
        lost = {k: [] if tokens == [] else None for k, tokens in self.expected.items()}
        self.expected = {**lost, i: []}


@pytest.fixture
def walk(tiny_model: Callable[..., Any]) -> Iterator[Callable[..., Walk]]:
    with ExitStack() as stack:

        def begin(arch: str, setting: Setting, seed: int, made: dict[str, int], **more: Any) -> Walk:
            model = tiny_model(arch, **made)
            llm = stack.enter_context(closing(setting.open(Llama, model, **more)))
            reference = stack.enter_context(closing(Reference(model, setting)))
            return Walk(llm, reference, setting.tolerance, random.Random(seed))

        yield begin


ALONE = (
    "append",
    "append",
    "cut",
    "cut",
    "empty",
    "save",
    "save",
    "restore",
    "restore",
    "foreign",
    "stopped",
)
SHARED = (*ALONE, "append", "together", "together", "restore", "zero")


def go(walk: Walk, kinds: tuple[str, ...], steps: int, room: int) -> None:
    for _ in range(steps):
        i = walk.chance.randrange(len(walk.lives))
        if len(walk.expected[i] or ()) > room:
            walk.step("empty", i)
        walk.step(walk.chance.choice(kinds), i)
        walk.check(i)


FULL = pytest.mark.full
KINDS = [
    pytest.param("qwen35", DEFAULT, {}, {}, id="qwen35"),
    pytest.param("qwen35", DEFAULT, {}, {"draft_planes": 4}, id="qwen35-planes"),
    pytest.param("gemma3", WINDOW, {"window": 16}, {}, id="gemma3-window"),
    pytest.param("gemma3", DEFAULT, {"window": 16}, {}, id="gemma3"),
    pytest.param("llama", DEFAULT, {}, {}, id="llama"),
    pytest.param("mamba", DEFAULT, {}, {}, id="mamba"),
    pytest.param("qwen35", FLASH, {}, {}, id="qwen35-flash", marks=FULL),
    pytest.param("jamba", DEFAULT, {}, {}, id="jamba", marks=FULL),
    pytest.param("lfm2", DEFAULT, {}, {"draft_planes": 4}, id="lfm2-planes", marks=FULL),
    pytest.param("rwkv7", DEFAULT, {}, {}, id="rwkv7", marks=FULL),
    pytest.param("gpt-oss", WINDOW, {"window": 16}, {}, id="gpt-oss-window", marks=FULL),
]


@pytest.mark.parametrize(("arch", "setting", "made", "more"), KINDS)
def test_sequence_has_the_logits_of_a_fresh_context_after_any_operations(
    walk: Callable[..., Walk], arch: str, setting: Setting, made: dict[str, int], more: dict[str, int]
) -> None:
    one = walk(arch, setting, 1, made, **more)
    go(one, ALONE, 90, 260)
    assert one.done >= {"exact cut", "save", "restore", "foreign", "aborted"}


@pytest.mark.parametrize(("arch", "setting", "made", "more"), [k for k in KINDS if "planes" not in str(k.id)])
def test_sequences_of_one_context_do_not_disturb_each_other(
    walk: Callable[..., Walk], arch: str, setting: Setting, made: dict[str, int], more: dict[str, int]
) -> None:
    plain = {} if setting is FLASH else {"flash_attn": False}  # as what it is compared with
    three = walk(arch, setting, 2, made, n_parallel=3, **plain, **more)
    go(three, SHARED, 120, 110)
    assert three.done >= {"save", "restore", "foreign", "aborted", "together", "zero"}


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_lost_cells_are_noticed_and_nothing_is_stored_of_them(
    walk: Callable[..., Walk], lose_cells: Callable[[Any, int, int], None], arch: str
) -> None:
    """The positions are as before: only the size of the state tells."""
    one = walk(arch, DEFAULT, 3, {})
    one.decode(0, one.text(60))
    live = one.lives[0]
    lose_cells(one.llm.ctx, 2, 5)
    assert live.fault(deep=False) is None
    assert "bytes" in live.fault()
    assert live.checkpoint(new) is None
    assert live.page_out(0, 40, new) is None
    one.step("empty", 0)
    one.step("append", 0)
    one.check(0)


def test_a_position_that_is_gone_is_noticed(walk: Callable[..., Walk]) -> None:
    one = walk("qwen35", DEFAULT, 4, {})
    one.decode(0, one.text(60))
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(one.llm.ctx), 0, -1, -1)
    assert "position" in one.lives[0].fault()
    one.step("empty", 0)
    one.step("append", 0)
    one.check(0)


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_with_the_same_batches_a_restored_state_has_the_very_bits(
    walk: Callable[..., Walk], arch: str
) -> None:
    one = walk(arch, DEFAULT, 5, {})
    one.decode(0, one.text(PIECE))
    one.save(0)
    tail = one.text(7)
    wanted = one.decode(0, tail)
    one.empty(0)
    one.decode(0, one.text(PIECE))
    one.restore(0)
    assert np.array_equal(one.decode(0, tail), wanted)
