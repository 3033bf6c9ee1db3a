"""0018: a state can be had in pieces, without a buffer for all of it."""

from __future__ import annotations

import ctypes
from copy import copy
from pathlib import Path

import pytest
from capi import FULL, PARTIAL, Context, lib

ON_DEVICE = 2
TAKE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def supported() -> bool:
    return hasattr(lib._lib, "llama_state_seq_write_ext")


class Pieces:
    """What the functions that 0018 adds hand out for a context."""

    def __init__(self, context: Context, most: int = 1 << 40) -> None:
        self.ctx = context.ctx
        self.most = most
        self.data = b""
        self.lengths: list[int] = []

    def state(self, flags: int = 0, seq: int = 0) -> int:
        return self._call("ext", ctypes.c_int32(seq), ctypes.c_uint32(flags))

    def range(self, begin: int, end: int) -> int:
        return self._call("range", ctypes.c_int32(0), ctypes.c_int32(begin), ctypes.c_int32(end))

    def _call(self, name: str, *arguments: object) -> int:
        function = getattr(lib._lib, f"llama_state_seq_write_{name}")
        function.restype = ctypes.c_size_t
        return int(function(ctypes.c_void_p(self.ctx), *arguments, TAKE(self._take), None))

    def _take(self, data: int, size: int, _: object) -> bool:
        if len(self.data) + size > self.most:
            return False
        self.data += ctypes.string_at(data, size)
        self.lengths.append(size)
        return True


def ranges(context: Context, begin: int, end: int) -> bytes:
    size, get = lib._lib.llama_state_seq_get_size_range, lib._lib.llama_state_seq_get_data_range
    size.restype = get.restype = ctypes.c_size_t
    place = [ctypes.c_int32(value) for value in (0, begin, end)]
    n = size(ctypes.c_void_p(context.ctx), *place)
    buffer = ctypes.create_string_buffer(max(1, n))
    written = get(ctypes.c_void_p(context.ctx), buffer, ctypes.c_size_t(n), *place)
    return buffer.raw[:written]


def same(path):
    if not supported():
        return None
    context = Context(path)
    context.feed(0, 40)
    seen = []
    for flags in (0, PARTIAL):
        pieces = Pieces(context)
        whole = context.save(flags=flags)
        seen.append(pieces.state(flags) == len(whole) and pieces.data == whole and len(pieces.lengths) > 2)
    pieces = Pieces(context)
    whole = ranges(context, 10, 30)
    seen.append(pieces.range(10, 30) == len(whole) and pieces.data == whole)
    return seen


def refused(path):
    if not supported():
        return None
    context = Context(path)
    context.feed(0, 40)
    before = context.save()
    results = [Pieces(context, most).state() for most in (0, 4, len(before) // 2, len(before) - 1)]
    results += [Pieces(context).state(seq=seq) for seq in (-7, 300)]
    results += [
        Pieces(context).state(ON_DEVICE),
        Pieces(context).range(30, 10),
        Pieces(context, 8).range(0, 10),
    ]
    return results, context.save() == before


def split_over_two_devices(path: str) -> int:
    """The model again, each of its tensors in two parts: the CPU serves as two devices."""
    ggml = ctypes.CDLL(str(next(Path(lib._lib._name).parent.glob("libggml.*"))))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    cpu = ggml.ggml_backend_dev_by_type(0)
    devices = (ctypes.c_void_p * 3)(cpu, cpu, None)
    params = lib.llama_model_default_params()
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.split_mode = 3  # LLAMA_SPLIT_MODE_TENSOR
    params.n_gpu_layers = 99
    split = lib.llama_model_load_from_file(path.encode(), params)
    assert split
    return int(split)


def tensor_parallel(path):
    """The state comes from one device, since the CPU cannot compute as two."""
    if not supported():
        return None
    shape = {"n_ctx": 4096, "n_ubatch": 256, "flash_attn_type": 1}
    donor = Context(path, **shape)
    assert donor.feed(0, 3000) == 0
    split = copy(donor.bench)
    split.model = split_over_two_devices(path)
    context = split.context(**shape)
    seen = []
    for flags in (FULL, PARTIAL):
        whole = donor.save(flags=flags)
        assert context.load(whole, flags=flags)
        pieces = Pieces(context)
        written = pieces.state(flags)
        seen.append(written == len(whole) and pieces.data == whole == context.save(flags=flags))
    pieces = Pieces(context)
    whole = ranges(context, 10, 2900)
    seen.append(pieces.range(10, 2900) == len(whole) and pieces.data == whole)
    return seen, max(pieces.lengths)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba", "gemma3", "llama"])
def test_the_pieces_are_the_state(run, tiny_model, arch):
    answer = run(same, tiny_model(arch))
    assert answer, "no such function"
    assert answer == [True, True, True]


def test_a_state_that_cannot_be_written_is_none(run, tiny_model):
    answer = run(refused, tiny_model("qwen35"))
    assert answer, "no such function"
    results, unchanged = answer
    assert set(results) == {0}
    assert unchanged


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_tensors_split_over_devices_are_asked_for_whole_rows(run, tiny_model, arch):
    """Rows of 384 bytes or so do not fill 1 MiB, and more than that is asked for."""
    answer = run(tensor_parallel, tiny_model(arch, embd=192))
    assert answer, "no such function"
    same, longest = answer
    assert same == [True, True, True]
    assert (1 << 20) - 4096 < longest < 1 << 20
