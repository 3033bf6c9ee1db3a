"""0016: rollback planes come and go while a context is in use, and nothing else changes."""

from __future__ import annotations

from ctypes import c_bool, c_size_t, c_uint32, c_void_p
from functools import partial

import pytest
from capi import EXACT, ON_DEVICE, PARTIAL, Context, continued, difference, fresh, function, lib

from llamahybrid.harness.hazards.process import memory_left


def resizer(context):
    """`llama_set_n_rs_seq` of this context."""
    return partial(function("llama_set_n_rs_seq", c_bool, c_void_p, c_uint32), context.ctx)


def memory_of(context):
    return function("llama_get_memory_buffer_size", c_size_t, c_void_p)(context.ctx)


def grown_and_shrunk(path):
    """A chat during which planes come and go, against one that never had any: bytes and logits."""
    context, plain = Context(path), Context(path)
    resize = resizer(context)
    before = memory_of(context)
    report = []
    position = 0
    for planes in (0, 8, 8, 3, 0, 8, 0):
        assert resize(planes)
        assert lib.llama_n_rs_seq(context.ctx) == planes
        for end in (position + 30, position + 31):  # a batch, then a single token
            assert context.feed(position, end) == plain.feed(position, end) == 0
            position = end
        report.append(difference(context.logits(), plain.logits()))
    return report, before, memory_of(context), context.save() == plain.save()


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "lfm2"])
def test_a_resize_changes_no_logits_and_no_saved_bytes(run, tiny_model, arch):
    apart, before, after, same_bytes = run(grown_and_shrunk, tiny_model(arch))
    assert max(apart) < EXACT
    assert abs(after - before) <= 0.01 * before
    assert same_bytes


def rolled_back(path):
    """Rollbacks after growing, after a decode, pending over a resize, beyond what both sizes have."""
    context = Context(path)
    resize = resizer(context)
    assert context.feed(0, 40) == 0
    assert resize(4)
    at_once = context.rm(0, 38, -1)  # no plane was filled yet
    assert context.feed(40, 45) == 0
    kept = context.rm(0, 43, -1)
    off = [continued(context, path, 43)]
    assert context.feed(44, 49) == 0
    pending = context.rm(0, 46, -1) and resize(8) and context.ends() == (45, 45)
    twice = context.rm(0, 45, -1)  # a plane behind the one that was carried out
    off.append(continued(context, path, 46))
    assert context.feed(47, 55) == 0
    assert resize(2)
    deep = context.rm(0, 50, -1)  # lost with the planes
    shallow = context.rm(0, 53, -1)
    off.append(continued(context, path, 53))
    return [at_once, twice, deep], [kept, bool(pending), shallow], off


@pytest.mark.parametrize("arch", ["qwen35", "lfm2"])
def test_rollbacks_reach_as_far_as_planes_are_valid(run, tiny_model, arch):
    refused, granted, off = run(rolled_back, tiny_model(arch))
    assert refused == [False] * 3
    assert granted == [True] * 3
    assert None not in off
    assert max(off) < EXACT


def moved(path):
    """Snapshots taken at one size and restored at another."""
    context = Context(path)
    resize = resizer(context)
    assert context.feed(0, 40) == 0
    record = context.save(flags=PARTIAL)
    assert context.feed(40, 60) == 0
    assert resize(6)
    loaded = context.load(record, flags=PARTIAL) and context.rm(0, 40, -1)
    return bool(loaded), continued(context, path, 40)


def test_snapshots_move_between_sizes(run, tiny_model):
    loaded, off = run(moved, tiny_model("qwen35"))
    assert loaded
    assert off < EXACT


def without_memory(path):
    """An allocation that fails: nothing is lost, and it works once there is memory."""
    context = Context(path, n_ubatch=256)
    resize = resizer(context)
    assert context.feed(0, 40) == 0
    before = memory_of(context)
    with memory_left(16 << 20):
        refused = not resize(200)
    state = refused, lib.llama_n_rs_seq(context.ctx), memory_of(context) == before
    return state, continued(context, path, 40), resize(200), continued(context, path, 41)


def test_failed_allocation_changes_nothing(run, tiny_model):
    (refused, planes, same_size), off, granted, off_then = run(
        without_memory, tiny_model("qwen35", embd=256, layers=8)
    )
    assert refused
    assert (planes, same_size) == (0, True)
    assert off < EXACT
    assert granted
    assert off_then < EXACT


def impossible(path):
    """Sizes that cannot be: where no rollback is known, and where a batch has no room."""
    context = Context(path, n_ubatch=64)
    resize = resizer(context)
    assert context.feed(0, 20) == 0
    return [resize(63), resize(1000)], resize(4), continued(context, path, 20)


@pytest.mark.parametrize(("arch", "grows"), [("qwen35", True), ("mamba", False), ("llama", False)])
def test_impossible_sizes_are_refused(run, tiny_model, arch, grows):
    refused, grown, off = run(impossible, tiny_model(arch))
    assert refused == [False, False]
    assert grown is grows
    assert off < EXACT


def device_states(path):
    """A state kept on the device is gone after a resize, and says so."""
    context = Context(path)
    resize = resizer(context)
    assert context.feed(0, 40) == 0
    record = context.save(flags=PARTIAL | ON_DEVICE)
    assert resize(4)
    return context.read(record, flags=PARTIAL | ON_DEVICE), difference(context.logits(), fresh(path, 39))


def test_states_kept_on_the_device_are_dropped(run, tiny_model):
    read, off = run(device_states, tiny_model("qwen35"))
    assert read == 0
    assert off < EXACT
