"""0034: a delta net's states are read where they lie, and not copied before each batch."""

from __future__ import annotations

import ctypes
from math import prod

import pytest
from capi import EXACT, Context, difference, fresh, lib
from cells import EVALUATE, SHAPE_AT

SLOTS = 3
SHARED = {"n_seq_max": SLOTS, "kv_unified": True}
LENGTH = 20


class Copies:
    """Counts the copies of whole recurrent states that a decode begins with, one a layer and batch."""

    def __init__(self) -> None:
        self._shapes: list[tuple[bytes, tuple[int, ...]]] = []
        self._native = EVALUATE(self._look)
        self.params = {"cb_eval": ctypes.cast(self._native, lib.ggml_backend_sched_eval_callback)}
        """For the context."""
        self._kind, self._name = lib._lib.ggml_op_desc, lib._lib.ggml_get_name
        for function in (self._kind, self._name):
            function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    def by(self, context: Context, rows: list[tuple[int, int, tuple[int, ...]]]) -> int:
        """The copies that a decode makes."""
        self._shapes.clear()
        assert context.decode(rows) == 0
        states = {prod(shape) for kind, shape in self._shapes if kind == b"state"}
        assert len(states) == 1, "each batch has as many sequences, and each layer as large a state"
        return sum(kind == b"GET_ROWS" and prod(shape) in states for kind, shape in self._shapes)

    def _look(self, tensor: int, ask: bool, _: object) -> bool:
        if ask:
            kind = b"state" if self._name(tensor).startswith(b"state_predelta") else self._kind(tensor)
            self._shapes.append((kind, tuple((ctypes.c_int64 * 4).from_address(tensor + SHAPE_AT))))
        return False


def step(context: Context, position: int, order: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    """A token of each of these sequences."""
    return [(context.bench.token(position, seq), position, (seq,)) for seq in order]


def together(path):
    """Copies by steps of all sequences, in one order and then in another, and how far off each is then."""
    copies = Copies()
    context = Context(path, **SHARED, **copies.params)
    for seq in range(SLOTS):
        assert context.feed(0, LENGTH, seq) == 0
    orders = [(0, 1, 2), (0, 1, 2), (2, 0, 1), (2, 0, 1), (0, 2), (0, 2)]
    positions = [LENGTH, LENGTH + 1, LENGTH + 2, LENGTH + 3, LENGTH + 4, LENGTH + 5]
    made = [copies.by(context, step(context, *each)) for each in zip(positions, orders, strict=True)]
    apart = []
    for seq, length in enumerate((LENGTH + 6, LENGTH + 4, LENGTH + 6)):
        assert context.feed(length, length + 1, seq) == 0
        apart.append(difference(context.logits(), fresh(path, length, text=seq, **SHARED)))
    return made, apart


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "qwen3next"])
def test_steps_of_the_same_sequences_in_the_same_order_copy_no_states(run, tiny_model, arch):
    made, apart = run(together, tiny_model(arch))
    assert made[1] == made[3] == made[5] == 0
    assert made[2], "where they come in another order their states change places"
    assert max(apart) < EXACT


def alone(path):
    """Copies of a sequence that is alone: its prompt, in one batch and in several, and its tokens."""
    copies = Copies()
    context = Context(path, **copies.params)
    batches = [range(100), range(100, 200), range(200, 201), range(201, 202)]
    return [copies.by(context, [(context.bench.token(p), p, (0,)) for p in batch]) for batch in batches]


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "qwen3next", "qwen4exp"])
def test_one_sequence_copies_no_states(run, tiny_model, arch):
    assert run(alone, tiny_model(arch)) == [0, 0, 0, 0]


def begun_again(path):
    """A sequence that begins where others lie, and one that goes on from another's state."""
    context = Context(path, **SHARED)
    for seq in range(SLOTS):
        assert context.feed(0, LENGTH, seq) == 0
    assert context.decode(step(context, LENGTH, (0, 1, 2))) == 0
    assert context.rm(1, -1, -1)
    assert context.feed(0, LENGTH, 1) == 0
    assert context.rm(0, -1, -1)
    context.cp(2, 0)
    rows = [(context.bench.token(LENGTH + 1, 2), LENGTH + 1, (seq,)) for seq in (0, 2)]
    assert context.decode(rows) == 0
    apart = []
    for seq, text, length in ((0, 2, LENGTH + 2), (1, 1, LENGTH), (2, 2, LENGTH + 2)):
        assert context.feed(length, length + 1, seq, text=text) == 0
        apart.append(difference(context.logits(), fresh(path, length, text=text, **SHARED)))
    return apart


@pytest.mark.parametrize(
    "arch", ["qwen35", "qwen35moe", "qwen3next", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"]
)
def test_what_begins_anew_or_from_another_state_is_right(run_both, tiny_model, arch):
    assert max(run_both(begun_again, tiny_model(arch))) < EXACT
