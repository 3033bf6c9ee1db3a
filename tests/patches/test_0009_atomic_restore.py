"""0009: a state that cannot be read leaves everything as it was, from memory and from a file."""

from __future__ import annotations

import ctypes
import os
import tempfile

import pytest
from capi import EXACT, FULL, PARTIAL, Context, continued, lib

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
