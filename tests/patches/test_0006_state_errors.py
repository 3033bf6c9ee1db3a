"""0006: a state that cannot be read, or belongs to other device memory, is refused; nothing dies of it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from capi import EXACT, FULL, ON_DEVICE, PARTIAL, Context, continued, lib

DEVICE_PARTIAL = PARTIAL | ON_DEVICE
TWO = {"n_seq_max": 2, "kv_unified": True}
HEADER = struct.calcsize("<Ii")  # magic, sequence


def wrong_magic(path):
    context = Context(path)
    context.feed(0, 12)
    context.save(flags=DEVICE_PARTIAL)
    return context.read(b"\0" * 64, flags=DEVICE_PARTIAL)


def another_context(path):
    context = Context(path)
    context.feed(0, 12)
    blob = context.save(flags=DEVICE_PARTIAL)
    other = Context(path)
    other.feed(0, 12)
    before = other.read(blob, flags=DEVICE_PARTIAL)
    other.save(flags=DEVICE_PARTIAL)
    return before + other.read(blob, flags=DEVICE_PARTIAL)


def flags_mixed(path):
    context = Context(path)
    context.feed(0, 12)
    partial = context.save(flags=DEVICE_PARTIAL)
    full = context.save(flags=ON_DEVICE)
    return context.read(partial, flags=DEVICE_PARTIAL) + context.read(full, flags=DEVICE_PARTIAL)


def trailing_bytes(path):
    context = Context(path)
    context.feed(0, 12)
    return context.read(context.save(flags=DEVICE_PARTIAL) + b"\0" * 4, flags=DEVICE_PARTIAL)


def an_older_save(path):
    context = Context(path)
    context.feed(0, 12)
    older = context.save(flags=DEVICE_PARTIAL)
    context.feed(12, 20)
    context.save(flags=DEVICE_PARTIAL)
    return context.read(older, flags=DEVICE_PARTIAL)


def two_recurrent_cells(path):
    context = Context(path, n_seq_max=2)
    context.feed(0, 12)
    blob = bytearray(context.save(flags=PARTIAL))
    struct.pack_into("<I", blob, HEADER, 2)
    cell = struct.calcsize("<IiI")
    blob[HEADER + cell : HEADER + cell] = struct.pack("<iI", 99, 0)
    return context.read(bytes(blob), flags=PARTIAL)


def a_sequence_too_many(path):
    context = Context(path, n_rs_seq=2, **TWO)
    return context.read(context.save(flags=PARTIAL), 5, PARTIAL)


def negative_positions(path):
    context = Context(path)
    context.feed(0, 12)
    sizes = []
    for flags, place in ((PARTIAL, HEADER + 4), (FULL, HEADER + 8)):
        blob = bytearray(context.save(flags=flags))
        struct.pack_into("<i", blob, place, -7)
        sizes.append(context.read(bytes(blob), flags=flags))
    return sum(sizes)


def scattered_on_device(path):
    context = Context(path, n_seq_max=3, kv_unified=True)
    for seq in range(3):
        context.feed(0, 8, seq)
    context.rm(1, -1, -1)
    return len(context.save(-1, DEVICE_PARTIAL))


def a_name_without_end(path):
    context = Context(path)
    before = peak_kib()
    blob = struct.pack("<I", 200 << 20) + b"x" * 64
    assert lib.llama_state_set_data(context.ctx, (lib.ctypes.c_uint8 * len(blob))(*blob), len(blob)) == 0
    return (peak_kib() - before) >> 10


def peak_kib():
    """Peak resident memory since this program was started (`ru_maxrss` may be that of the parent before)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def kept_on_device(path):
    context = Context(path)
    context.feed(0, 12)
    blob = context.save(flags=DEVICE_PARTIAL)
    context.feed(12, 20)
    read = context.read(blob, flags=DEVICE_PARTIAL)
    context.rm(0, 12, -1)
    return read == len(blob), continued(context, path, 12)


REFUSED = [
    wrong_magic,
    another_context,
    flags_mixed,
    trailing_bytes,
    an_older_save,
    two_recurrent_cells,
    a_sequence_too_many,
    negative_positions,
    scattered_on_device,
]


@pytest.mark.parametrize("probe", REFUSED)
def test_a_bad_state_is_refused(run, tiny_model, probe):
    assert run(probe, tiny_model("qwen35")) == 0


def test_a_damaged_length_allocates_nothing(run, tiny_model):
    assert run(a_name_without_end, tiny_model("qwen35")) < 50  # MiB


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_the_newest_save_on_the_device_is_restored(run_both, tiny_model, arch):
    read, off = run_both(kept_on_device, tiny_model(arch))
    assert read
    assert off < EXACT
