"""0009: a state that cannot be read leaves everything as it was, from memory and from a file."""

from __future__ import annotations

import ctypes
import os
import tempfile

import heap
import pytest
from capi import EXACT, FULL, PARTIAL, Context, continued, difference, fresh, lib

CUTS = (4, 8, 12, 16, 40, 200, -2000, -100, -8, -1)
TWO = {"n_seq_max": 2, "kv_unified": True}


def truncated(path):
    outcomes = []
    for flags in (FULL, PARTIAL):
        donor = Context(path)
        donor.feed(0, 30, text=3)
        blob = donor.save(flags=flags)
        context = Context(path)
        context.feed(0, 20)
        before = context.save()
        read = sum(context.read(blob[:cut], flags=flags) for cut in CUTS if abs(cut) < len(blob))
        outcomes.append((read, context.save() == before, continued(context, path, 20)))
    return outcomes


def truncated_whole(path):
    donor = Context(path, **TWO)
    donor.feed(0, 30, text=3)
    size = lib.llama_state_get_size(donor.ctx)
    blob = (ctypes.c_uint8 * size)()
    lib.llama_state_get_data(donor.ctx, blob, size)
    context = Context(path, **TWO)
    context.feed(0, 20)
    context.feed(0, 15, 1)
    before = context.save(0), context.save(1)
    read = sum(lib.llama_state_set_data(context.ctx, blob, cut if cut > 0 else size + cut) for cut in CUTS)
    after = context.save(0), context.save(1)
    return [(read, after == before, continued(context, path, 20))]


def truncated_file(path):
    tokens, count = (lib.llama_token * 64)(), ctypes.c_size_t()
    donor = Context(path)
    donor.feed(0, 30, text=3)
    context = Context(path)
    context.feed(0, 20)
    before = context.save()
    read = 0
    with tempfile.TemporaryDirectory() as folder:
        for suffix, save in (("seq", lib.llama_state_seq_save_file), ("all", lib.llama_state_save_file)):
            name = os.path.join(folder, suffix).encode()
            extra = (0,) if suffix == "seq" else ()
            assert save(donor.ctx, name, *extra, tokens, 4)
            with open(name, "rb") as file:
                whole = file.read()
            for damaged in (whole[:-8], whole[:-2000], whole[:60], whole + b"\0" * 8):
                with open(name, "wb") as file:
                    file.write(damaged)
                if suffix == "seq":
                    read += lib.llama_state_seq_load_file(
                        context.ctx, name, 0, tokens, 64, ctypes.byref(count)
                    )
                else:
                    read += lib.llama_state_load_file(context.ctx, name, tokens, 64, ctypes.byref(count))
    return [(read, context.save() == before, continued(context, path, 20))]


def whole_file(path):
    tokens, count = (lib.llama_token * 64)(), ctypes.c_size_t()
    donor = Context(path)
    donor.feed(0, 30)
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "state").encode()
        lib.llama_state_seq_save_file(donor.ctx, name, 0, tokens, 4)
        context = Context(path)
        context.feed(0, 20, text=3)
        read = lib.llama_state_seq_load_file(context.ctx, name, 0, tokens, 64, ctypes.byref(count))
        return read == os.path.getsize(name), continued(context, path, 30)


def shrinking_file(path, whole):
    """A file loses its end when it is parsed and its data is read: what is replaced cannot be had back."""
    tokens, count = (lib.llama_token * 64)(), ctypes.c_size_t()
    donor, context = Context(path, **TWO), Context(path, **TWO)
    donor.feed(0, 200, text=3)
    context.feed(0, 20)
    context.feed(0, 15, 1)
    other = context.save(1)
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "state")
        saved = (name.encode(), tokens, 4) if whole else (name.encode(), 0, tokens, 4)
        loaded = (*saved[:-1], 64, ctypes.byref(count))
        kind = "state" if whole else "state_seq"
        assert getattr(lib, f"llama_{kind}_save_file")(donor.ctx, *saved)
        end = os.path.getsize(name) - 256  # data of the last tensor: the rest can be parsed
        said = []

        def log(_level, text, _data):
            said.append(text.decode(errors="replace"))
            if "cell_count" in said[-1] or "reading memory" in said[-1]:
                os.truncate(name, end)

        callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(log)
        lib.llama_log_set(callback, None)
        read = getattr(lib, f"llama_{kind}_load_file")(context.ctx, *loaded)
        assert os.path.getsize(name) == end, said
    unharmed = context.last(1) == -1 if whole else context.save(1) == other
    left = context.last()
    begun = context.feed(0, 20, text=2)
    return read, left, unharmed, begun, continued_text(context, path, 20, 2)


def shrinking_sequence(path):
    return shrinking_file(path, whole=False)


def shrinking_context(path):
    return shrinking_file(path, whole=True)


def continued_text(context, path, length, text):
    """As `continued`, of another text."""
    assert context.feed(length, length + 1, text=text) == 0
    return difference(context.logits(), fresh(path, length, text=text, **TWO))


def beside_many(path):
    """A small state over a small one, beside many cells of another sequence."""
    context, at = heap.filled(path)
    state = at(heap.CELLS)

    assert context.load(state, 1)
    return heap.growth(lambda: context.load(state, 1)), context.last(1) - heap.CELLS


def check(outcomes):
    for read, same, off in outcomes:
        assert read == 0
        assert same
        assert off < EXACT


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba", "gemma3", "llama"])
def test_a_truncated_state_changes_nothing(run, tiny_model, arch):
    check(run(truncated, tiny_model(arch)))


def test_nor_with_a_window(run, tiny_model):
    check(run(truncated, tiny_model("lfm2", window=16)))


@pytest.mark.parametrize("probe", [truncated_whole, truncated_file])
@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_nor_does_a_truncated_whole_or_file(run, tiny_model, probe, arch):
    check(run(probe, tiny_model(arch)))


def test_a_sound_file_is_restored(run_both, tiny_model):
    read, off = run_both(whole_file, tiny_model("qwen35"))
    assert read
    assert off < EXACT


def dropped(outcome):
    read, left, unharmed, begun, off = outcome
    assert not read
    assert left == -1
    assert unharmed
    assert begun == 0
    assert off < EXACT


@pytest.mark.parametrize("probe", [shrinking_sequence, shrinking_context])
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_what_is_half_replaced_is_dropped(run_both, tiny_model, probe, arch):
    dropped(run_both(probe, tiny_model(arch)))


@pytest.mark.parametrize("probe", [shrinking_sequence, shrinking_context])
def test_so_it_is_beside_a_window(run, tiny_model, probe):
    dropped(run(probe, tiny_model("gemma3")))


def test_a_restore_does_not_copy_what_it_leaves_alone(run_both, tiny_model):
    grown, last = run_both(beside_many, tiny_model("llama"))
    if grown is None:
        pytest.skip("the heap cannot be measured here")
    assert grown < heap.LEAST_COPY
    assert last == 63
