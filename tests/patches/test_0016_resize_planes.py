"""0016: rollback planes come and go while a context is in use, and nothing else changes."""

from __future__ import annotations

from ctypes import c_bool, c_size_t, c_uint32, c_void_p
from functools import partial

from capi import ON_DEVICE, PARTIAL, Context, function, gap, lib, on, sound

from llamahybrid.harness.hazards.process import memory_left


def resizer(context):
    """`llama_set_n_rs_seq` of this context."""
    return partial(function("llama_set_n_rs_seq", c_bool, c_void_p, c_uint32), context.ctx)


def memory_of(context):
    return function("llama_get_memory_buffer_size", c_size_t, c_void_p)(context.ctx)


@on("qwen35", "qwen35moe", "lfm2")
def test_a_resize_changes_no_logits_and_no_saved_bytes(path):
    """A chat during which planes come and go, against one that never had any."""
    context, plain = Context(path), Context(path)
    resize, before, position = resizer(context), memory_of(context), 0
    for planes in (0, 8, 8, 3, 0, 8, 0):
        assert resize(planes)
        assert lib.llama_n_rs_seq(context.ctx) == planes
        for end in (position + 30, position + 31):  # a batch, then a single token
            assert context.feed(position, end) == plain.feed(position, end) == 0
            position = end
        assert gap(context.logits(), plain.logits()).exact
    assert abs(memory_of(context) - before) <= 0.01 * before
    assert context.save() == plain.save()


@on("qwen35", "lfm2")
def test_rollbacks_reach_as_far_as_planes_are_valid(path):
    """After growing, after a decode, pending over a resize, beyond what both sizes have."""
    context = Context(path).grown(40)
    resize = resizer(context)
    assert resize(4)
    assert not context.rm(0, 38, -1), "no plane was filled yet"
    assert context.feed(40, 45) == 0
    assert context.rm(0, 43, -1)
    assert sound(context, 43)
    assert context.feed(44, 49) == 0
    assert context.rm(0, 46, -1)
    assert resize(8)
    assert (context.first(), context.last()) == (45, 45)
    assert not context.rm(0, 45, -1), "a plane behind the one that was carried out"
    assert sound(context, 46)
    assert context.feed(47, 55) == 0
    assert resize(2)
    assert not context.rm(0, 50, -1), "lost with the planes"
    assert context.rm(0, 53, -1)
    assert sound(context, 53)


@on("qwen35")
def test_snapshots_move_between_sizes(path):
    context = Context(path).grown(40)
    record = context.save(flags=PARTIAL)
    assert context.feed(40, 60) == 0
    assert resizer(context)(6)
    assert context.load(record, flags=PARTIAL)
    assert context.rm(0, 40, -1)
    assert sound(context, 40)


@on("qwen35", embd=256, layers=8)
def test_failed_allocation_changes_nothing(path):
    """And it works once there is memory."""
    context = Context(path, n_ubatch=256).grown(40)
    resize, before = resizer(context), memory_of(context)
    with memory_left(16 << 20):
        assert not resize(200)
    assert (lib.llama_n_rs_seq(context.ctx), memory_of(context)) == (0, before)
    assert sound(context, 40)
    assert resize(200)
    assert sound(context, 41)


@on("qwen35", "mamba", "llama")
def test_impossible_sizes_are_refused(path):
    """Sizes that cannot be: where no rollback is known, and where a batch has no room."""
    context = Context(path, n_ubatch=64).grown(20)
    resize = resizer(context)
    assert not resize(63)
    assert not resize(1000)
    assert resize(4) == lib.llama_model_is_hybrid(context.tested.model)
    assert sound(context, 20)


@on("qwen35")
def test_states_kept_on_the_device_are_dropped(path):
    context = Context(path).grown(40)
    record = context.save(flags=PARTIAL | ON_DEVICE)
    assert resizer(context)(4)
    assert context.read(record, flags=PARTIAL | ON_DEVICE) == 0
    assert sound(context, 40)
