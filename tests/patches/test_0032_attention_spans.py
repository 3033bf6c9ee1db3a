"""0032: in a cache that several sequences share, a token is computed with the cells of its own sequence."""

from __future__ import annotations

import ctypes
import random

import cells
import numpy as np
import pytest
from capi import Context, difference, lib

from llamahybrid.tiny import make, specs

SLOTS = 4
SHARED = {"n_seq_max": SLOTS, "kv_unified": True, "n_ctx": 4096}
CROWDED = {**SHARED, "n_ctx": 1024, "n_batch": 256, "n_ubatch": 64}
"""So few cells that the gaps between sequences are soon filled, and they lie in pieces."""

MERGED = 1e-2
"""Rows computed together and alone differ by less, as a part of the range of the logits."""

LENGTH = 300
"""More than the 256 cells by which the cache counts."""

FLASH = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED


def _by_seq(context: Context) -> bool:
    """What the context says of itself; stock has no such function."""
    function = getattr(lib._lib, "llama_attends_by_seq", None)
    if function is None:
        return False
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    return bool(function(context.ctx))


def alone_beside_others(path, length=LENGTH, slots=SLOTS, **params):
    """A token of each sequence by itself: how far from what a context of that one alone says."""
    params = {**params, "n_seq_max": slots}
    context = Context(path, **{**SHARED, **params})
    for seq in range(slots):
        assert context.feed(0, length, seq, chunk=100) == 0
    apart = []
    for seq in range(slots):
        alone = Context(path, **{**SHARED, **params, "n_seq_max": 1})
        assert context.feed(length, length + 1, seq) == 0
        assert alone.feed(0, length, text=seq, chunk=100) == 0
        assert alone.feed(length, length + 1, text=seq) == 0
        apart.append(float(np.abs(context.logits() - alone.logits()).max()))
    return [_by_seq(context), apart]


@pytest.mark.parametrize("arch", ["llama", "qwen35", "jamba", "lfm2"])
def test_a_token_beside_other_sequences_is_computed_as_without_them(run, tiny_model, arch):
    """Bit by bit: the same numbers are added in the same order."""
    assert run(alone_beside_others, tiny_model(arch)) == [True, [0.0] * SLOTS]


def in_a_full_cache(path):
    """Sequences of equal parts of the cache, that came one after the other."""
    return [alone_beside_others(path, 700, slots, n_ctx=slots * 768) for slots in (2, 4, 8)]


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_sequences_of_equal_length_lie_in_one_piece_each_however_full_the_cache_is(run, tiny_model, arch):
    """Elsewhere cells of others are among theirs, and numbers are added in another order."""
    assert run(in_a_full_cache, tiny_model(arch)) == [[True, [0.0] * slots] for slots in (2, 4, 8)]


def of_two_sequences(path):
    """How many cells a token of two sequences attends to, beside two others, and how far it is off."""
    attended = cells.Attended()
    context, alone = Context(path, **SHARED, **attended.params), Context(path, **{**SHARED, "n_seq_max": 1})
    for seq in range(2):
        assert context.feed(0, LENGTH, seq, chunk=100) == 0
    for start in range(0, LENGTH, 100):
        rows = [(context.bench.token(p, 2), p, (2, 3)) for p in range(start, start + 100)]
        assert context.decode(rows) == 0
    count = attended.by(context, [(context.bench.token(LENGTH, 2), LENGTH, (2, 3))])
    assert alone.feed(0, LENGTH, text=2, chunk=100) == 0
    assert alone.feed(LENGTH, LENGTH + 1, text=2) == 0
    return [count, float(np.abs(context.logits() - alone.logits()).max())]


def test_a_token_of_several_sequences_is_computed_as_without_the_others(run, tiny_model):
    """With the cells of the first of them, and not with all up to the last one taken."""
    assert run(of_two_sequences, tiny_model("llama")) == [512, 0.0]


def as_many(path):
    """16 and 17 sequences: is each computed by itself, and by how many cells are the first two apart."""
    if not cells.told():
        return None
    found = []
    for slots in (16, 17):
        context = Context(path, **{**SHARED, "n_seq_max": slots})
        for seq in range(2):
            assert context.feed(0, 20, seq) == 0
        first, second = (cells.of(context, seq, 20) for seq in range(2))
        found.append([_by_seq(context), (second.begin - first.begin) // first.row])
    return found


@pytest.mark.needs("0018")
def test_more_sequences_than_spans_lie_together_as_before(run, tiny_model):
    """A step of all of them attends to all cells up to the last one taken: the nearer that is the better."""
    assert run(as_many, tiny_model("llama")) == [[True, 2048], [False, 20]]


def in_one_batch(path):
    """In how many pieces a prompt lies that fills more than half of the gap, and is computed in parts."""
    if not cells.told():
        return None
    context = Context(path, **{**SHARED, "n_seq_max": 2, "n_batch": 4096, "n_ubatch": 256})
    assert context.feed(0, 100) == 0
    assert context.feed(0, 3000, 1, chunk=3000) == 0
    return [_by_seq(context), len(cells.of(context, 1, 3000).runs)]


@pytest.mark.needs("0018")
def test_room_is_found_for_a_batch_and_not_for_its_first_part(run, tiny_model):
    assert run(in_one_batch, tiny_model("llama")) == [True, 1]


def _campaign(path: str, seed: int, params: dict[str, object]) -> float:
    """Random decodes of one and of several sequences, cuts, copies, saves and loads; each token compared."""
    chance = random.Random(seed)
    context = Context(path, **params)
    alone = [Context(path, **{**params, "n_seq_max": 1}) for _ in range(SLOTS)]
    ends, text, worst = [0] * SLOTS, list(range(SLOTS)), 0.0
    most = int(params["n_ctx"]) // SLOTS  # type: ignore[call-overload]
    copies = not lib.llama_model_is_hybrid(context.bench.model)

    def follow(seq: int, end: int) -> None:
        """The same beginning, alone."""
        assert alone[seq].rm(0, -1, -1)
        assert end == 0 or alone[seq].feed(0, end, text=text[seq], chunk=64) == 0
        ends[seq] = end

    for _ in range(40):
        seq, what = chance.randrange(SLOTS), chance.random()
        if what < 0.35:
            count = min(chance.choice((1, 3, 60, 150)), most - ends[seq])
            if count > 0:
                assert context.feed(ends[seq], ends[seq] + count, seq, text=text[seq], chunk=64) == 0
                assert alone[seq].feed(ends[seq], ends[seq] + count, text=text[seq], chunk=64) == 0
                ends[seq] += count
                worst = max(worst, difference(context.logits(), alone[seq].logits()))
        elif what < 0.75:
            who = [s for s in range(SLOTS) if chance.random() < 0.8 and ends[s] < most]
            chance.shuffle(who)
            if who:
                rows = [(context.bench.token(ends[s], text[s]), ends[s], (s,)) for s in who]
                assert context.decode(rows) == 0
                for row, s in enumerate(who):
                    assert alone[s].feed(ends[s], ends[s] + 1, text=text[s]) == 0
                    got = lib.llama_get_logits_ith(context.ctx, row)
                    size = alone[s].logits().size
                    worst = max(worst, difference(np.ctypeslib.as_array(got, (size,)), alone[s].logits()))
                    ends[s] += 1
        elif what < 0.85 and copies:
            other = chance.randrange(SLOTS)
            if other != seq:
                assert context.rm(other, -1, -1)
                context.cp(seq, other)
                text[other] = text[seq]
                follow(other, ends[seq])
        elif what < 0.93 and ends[seq]:
            state = context.save(seq)
            assert context.rm(seq, -1, -1)
            assert context.load(state, seq)
        else:
            assert context.rm(seq, -1, -1)
            text[seq] = chance.randrange(9)
            follow(seq, 0)
    return worst if _by_seq(context) else float("inf")


def in_turn(path, **params):
    """Tokens of two sequences in turn in one batch: how many cells they attend to, how far they are off."""
    attended = cells.Attended()
    context = Context(path, **{**SHARED, **params, **attended.params, "n_seq_max": 2})
    alone = [Context(path, **{**SHARED, **params, "n_seq_max": 1}) for _ in range(2)]
    for seq in range(2):
        assert context.feed(0, LENGTH, seq) == alone[seq].feed(0, LENGTH, text=seq) == 0
    rows = [(context.bench.token(p, s), p, (s,)) for p in range(LENGTH, LENGTH + 8) for s in range(2)]
    count = attended.by(context, rows)
    apart = []
    for seq in range(2):
        for position in range(LENGTH, LENGTH + 8):
            assert alone[seq].feed(position, position + 1, text=seq) == 0
            row = lib.llama_get_logits_ith(context.ctx, 2 * (position - LENGTH) + seq)
            wanted = alone[seq].logits()
            apart.append(difference(np.ctypeslib.as_array(row, wanted.shape), wanted))
    return [_by_seq(context), count, max(apart)]


def in_turn_flash(path):
    return in_turn(path, flash_attn_type=FLASH)


@pytest.mark.parametrize("probe", [in_turn, in_turn_flash])
def test_sequences_that_take_turns_in_a_batch(run, tiny_model, probe):
    """Each attends to the cells of its own, not to all up to the last one taken, and has its own row."""
    by_seq, count, apart = run(probe, tiny_model("llama"))
    assert by_seq
    assert count == (0 if probe is in_turn_flash else 16 * 512)  # flash attention has no such tensor
    assert apart < MERGED


def of_sixteen(path, **params):
    """A step of as many sequences as a graph has room for."""
    context = Context(path, **{**SHARED, **params, "n_seq_max": 16, "n_ctx": 16 * 512})
    alone = Context(path, **{**SHARED, **params, "n_seq_max": 1})
    for seq in range(16):
        assert context.feed(0, 20, seq) == 0
    assert context.decode([(context.bench.token(20, s), 20, (s,)) for s in range(16)]) == 0
    assert alone.feed(0, 20, text=15) == 0
    assert alone.feed(20, 21, text=15) == 0
    return [_by_seq(context), difference(context.logits(), alone.logits())]


def of_sixteen_flash(path):
    return of_sixteen(path, flash_attn_type=FLASH)


@pytest.mark.parametrize("probe", [of_sixteen, of_sixteen_flash])
def test_a_graph_has_room_for_all_spans(run, tmp_path, monkeypatch, probe):
    """A model with no more tensors than most have: its graph may have eight nodes for each of them."""
    monkeypatch.setitem(specs.ABSENT, "llama", (*specs.ABSENT.get("llama", ()), "scale", ".bias"))
    model = make("llama", tmp_path / "plain.gguf", layers=32)
    by_seq, apart = run(probe, model)
    assert by_seq
    assert apart < MERGED


def roomy(path):
    return [_campaign(path, seed, SHARED) for seed in range(3)]


def crowded(path):
    return [_campaign(path, seed, CROWDED) for seed in range(3, 6)]


def flash(path):
    return [_campaign(path, seed, {**CROWDED, "flash_attn_type": FLASH}) for seed in range(6, 8)]


def quantized(path):
    cells = {"type_k": lib.GGML_TYPE_Q8_0, "type_v": lib.GGML_TYPE_Q8_0}
    return [_campaign(path, seed, {**CROWDED, **cells, "flash_attn_type": FLASH}) for seed in range(8, 10)]


@pytest.mark.parametrize("arch", ["llama", "qwen35", "jamba"])
@pytest.mark.parametrize("campaign", [roomy, crowded, flash])
def test_whatever_lies_where_each_sequence_goes_on_as_alone(run, tiny_model, arch, campaign):
    assert max(run(campaign, tiny_model(arch))) < MERGED


def test_quantized_cells_are_read_where_they_lie(run, tiny_model):
    assert max(run(quantized, tiny_model("llama"))) < 5 * MERGED
