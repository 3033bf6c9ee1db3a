"""The shim and its stand-ins do the same: each test runs with the compiled one and without."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from llamahybrid.capi import shim as native
from llamahybrid.errors import EngineError
from llamahybrid.memory.sequence import UNCHANGED_BY_FAILURE

BYTES = ctypes.POINTER(ctypes.c_uint8)
TOKENS = np.arange(5, 35, dtype=np.int32)
ABORTED = 2


@pytest.fixture(params=["shim", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(native, "_shim", None)
        monkeypatch.setattr(native, "available", False)
    native.library.cache_clear()  # a library bound without the shim leaves the shim unbound
    return str(request.param)


@pytest.fixture
def context(tiny_model: Callable[..., Path]) -> Iterator[Callable[[], int]]:
    """`context()`: another one of the same model."""
    with ExitStack() as stack:

        def make() -> int:
            options = {"n_ctx": 128, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
            llm = stack.enter_context(closing(llama_cpp.Llama(str(tiny_model("qwen35")), **options)))
            return int(llm.ctx)

        yield make


def logits(ctx: int, row: int) -> list[float]:
    vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
    return list(llama_cpp.llama_get_logits_ith(ctx, row)[: llama_cpp.llama_vocab_n_tokens(vocab)])


def decode(ctx: int, tokens: np.ndarray) -> int:
    """`llama_decode` of tokens behind those that are there; its result."""
    ids = (ctypes.c_int32 * len(tokens))(*tokens)
    return int(llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(ids, len(tokens))))


def test_the_development_environment_has_the_shim() -> None:
    assert native.available


@pytest.mark.usefixtures("way")
def test_state_moves_to_another_context(context: Callable[[], int]) -> None:
    library, source, target = native.library(), context(), context()
    assert decode(source, TOKENS) == 0
    state = np.empty(llama_cpp.llama_state_seq_get_size_ext(source, 0, 0), np.uint8)
    assert library.save_state(source, state, 0, 0)
    assert library.load_state(target, state, 0, 0)
    assert not library.load_state(target, state[:-1], 0, 0)
    assert library.load_state(target, state, 0, 0)
    for ctx in (source, target):
        assert decode(ctx, TOKENS[:1]) == 0
    assert logits(source, -1) == logits(target, -1)


@pytest.mark.usefixtures("way")
def test_state_fails_without_harm_where_the_buffer_is_short(context: Callable[[], int]) -> None:
    library, ctx = native.library(), context()
    decode(ctx, TOKENS)
    size = llama_cpp.llama_state_seq_get_size_ext(ctx, 0, 0)
    for wrong in (size - 1, 8, 0):
        assert not library.save_state(ctx, np.empty(wrong, np.uint8), 0, 0)
    with pytest.raises(ValueError, match="contiguous"):
        library.save_state(ctx, np.empty(2 * size, np.uint8)[::2], 0, 0)


@pytest.mark.usefixtures("way")
def test_a_state_is_upstreams_bytes(context: Callable[[], int]) -> None:
    library, ctx = native.library(), context()
    decode(ctx, TOKENS)
    size = llama_cpp.llama_state_seq_get_size_ext(ctx, 0, 0)
    expected = np.empty(size, np.uint8)
    llama_cpp.llama_state_seq_get_data_ext(ctx, expected.ctypes.data_as(BYTES), size, 0, 0)
    room = np.full(size + 64, 7, np.uint8)
    out = room[3 : 3 + size]
    assert library.save_state(ctx, out, 0, 0)
    assert np.array_equal(out, expected)
    assert np.all(room[:3] == 7)
    assert np.all(room[3 + size :] == 7)


@pytest.mark.patched
@pytest.mark.usefixtures("way")
def test_a_range_is_saved_whole(context: Callable[[], int]) -> None:
    library, ctx = native.library(), context()
    if "llama_state_seq_get_data_range" not in library.optional:
        pytest.skip("this library has no ranges")
    decode(ctx, TOKENS)
    size_of = llama_cpp.llama_cpp._lib.llama_state_seq_get_size_range
    size_of.argtypes, size_of.restype = [ctypes.c_void_p, *[ctypes.c_int32] * 3], ctypes.c_size_t
    size = size_of(ctx, 0, 3, 20)
    part = np.empty(size, np.uint8)
    assert library.save_range(ctx, part, 0, 3, 20)
    for place in ((0, 3, 21), (0, 3, 19), (9, 3, 20), (0, 20, 3)):
        assert not library.save_range(ctx, part, *place)


def test_a_library_that_lacks_a_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "REQUIRED", (*native.REQUIRED, "llama_of_tomorrow"))
    with pytest.raises(EngineError, match="llama_of_tomorrow"):
        native.Library()


def swapped(one: str, other: str) -> type[ctypes.Structure]:
    """struct llama_batch with two fields at each other's place."""
    fields = dict(llama_cpp.llama_batch._fields_)
    names = [{one: other, other: one}.get(name, name) for name in fields]
    return type("Swapped", (ctypes.Structure,), {"_fields_": [(name, fields[name]) for name in names]})


LAYOUTS = {
    "two pointers in another order": swapped("pos", "n_seq_id"),
    "a number in the place of a pointer": swapped("n_tokens", "token"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_another_batch_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch, layout: type[ctypes.Structure]
) -> None:
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_batch", layout)
    with pytest.raises(EngineError, match="llama_batch"):
        native.Library()


@pytest.fixture
def throwing() -> Iterator[native.Library]:
    """A library all of whose functions throw std::bad_alloc."""
    try:
        throw = ctypes.CDLL("libstdc++.so.6")["_ZSt17__throw_bad_allocv"]
    except (OSError, AttributeError):
        pytest.skip("no function here that is known to throw")
    native.library.cache_clear()
    library, lib = native.library(), native._shim.lib
    address = ctypes.cast(throw, ctypes.c_void_p).value
    assert lib.llh_bind(address, address, address, native._layout(llama_cpp.llama_batch))
    yield library
    native.library.cache_clear()
    native.library()


def test_an_exception_of_libllama_is_not_called_harmless(throwing: native.Library) -> None:
    """After an allocation failed inside, the context may hold anything; nor may an exception reach Python."""
    tokens = (ctypes.c_int32 * len(TOKENS))(*TOKENS)
    assert throwing.decode(0, llama_cpp.llama_batch_get_one(tokens, len(tokens))) == native.THREW
    assert native.THREW not in UNCHANGED_BY_FAILURE
    state = np.empty(64, np.uint8)
    assert not throwing.load_state(0, state, 0, 0)
    assert not throwing.save_state(0, state, 0, 0)


def poll(stop: native.Stop) -> bool:
    """Call the native callback as ggml does."""
    assert stop.address is not None
    return bool(ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(stop.address)(stop.data))


def test_the_callback_stops_its_own_request_alone() -> None:
    stop = native.Stop()
    assert not poll(stop)
    first = stop.begin()
    assert not poll(stop)
    stop.request(first)
    assert poll(stop)
    second = stop.begin()
    assert not poll(stop)
    stop.request(first)
    assert not poll(stop)
    stop.request(second)
    stop.request(first)
    assert poll(stop)
    stop.end()
    assert not poll(stop)


def test_a_stop_does_nothing_when_nothing_runs() -> None:
    stop = native.Stop()
    stop.request(0)
    stop.request(1)
    assert not poll(stop)
    stop.begin()
    assert not poll(stop)


def test_a_stop_ends_a_decode_from_within(context: Callable[[], int]) -> None:
    library, ctx, stop = native.library(), context(), native.Stop()
    library.set_stop(ctx, stop)
    stop.request(stop.begin())
    assert decode(ctx, TOKENS) == ABORTED
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
    stop.begin()
    assert decode(ctx, TOKENS) == 0
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
    stop.request(stop.running)
    stop.end()
    assert decode(ctx, TOKENS) == 0


@pytest.mark.usefixtures("way")
def test_a_batch_is_decoded_as_upstream_does(context: Callable[[], int]) -> None:
    ours, theirs = context(), context()
    for tokens, result in ((TOKENS, 0), (np.array([1 << 30], np.int32), -1)):
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        assert native.library().decode(ours, llama_cpp.llama_batch_get_one(ids, len(tokens))) == result
        assert decode(theirs, tokens) == result
        assert logits(ours, -1) == logits(theirs, -1)
