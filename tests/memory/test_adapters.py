"""Adapters, control vectors and modes of a context: noticed, or named by a salt where they cannot be."""

import ctypes
import itertools
import shutil

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from tests.conftest import take

from .conftest import write_lora

PROMPT = [(7 * i + 1) % 200 for i in range(80)]
KINDS = (
    "qwen35",
    "gemma3",
    pytest.param("llama", marks=pytest.mark.full),
    pytest.param("mamba", marks=pytest.mark.full),
)
FLOATS = ctypes.POINTER(ctypes.c_float)


@pytest.fixture
def fresh(open_model):
    """The answer of a fresh stock context, after `prepare(llm)`."""

    def answer(prompt, arch="qwen35", prepare=lambda llm: None, **kw):
        llm = open_model(arch, llama_cpp.Llama, **kw)
        prepare(llm)
        return take(llm, prompt)

    return answer


@pytest.fixture
def lora(tmp_path):
    """`lora(arch, seed)`: the path of an adapter."""
    return lambda arch="qwen35", seed=1, path=None: write_lora(
        path or tmp_path / f"{arch}-{seed}.gguf", arch, seed
    )


def steer(llm, seed=1, setter=native.llama_set_adapter_cvec):
    """Put a control vector on a model's context; `seed` None takes it off."""
    if seed is None:
        return setter(llm._ctx.ctx, None, 0, 0, 0, 0)
    width, layers = llm.n_embd(), native.llama_model_n_layer(llm._model.model)
    noise = np.random.default_rng(seed).standard_normal(width * (layers - 1))
    numbers = (0.7 * noise).astype(np.float32)
    pointer = numbers.ctypes.data_as(FLOATS)
    assert setter(llm._ctx.ctx, pointer, numbers.size, width, 1, layers - 1) == 0
    return None


def unseen(name):
    """A function of the library by a handle of one's own."""
    function = getattr(ctypes.CDLL(native._lib._name), name)
    known = getattr(native, name)
    function.argtypes, function.restype = known.argtypes, known.restype
    return function


def load(llm, path):
    adapter = native.llama_adapter_lora_init(llm._model.model, str(path).encode())
    assert adapter
    return adapter


def adapt(llm, *put):
    """Put (adapter, scale) pairs on a model's context."""
    pointers = (native.llama_adapter_lora_p_ctypes * len(put))(*(a for a, _ in put))
    scales = (ctypes.c_float * len(put))(*(scale for _, scale in put))
    assert native.llama_set_adapters_lora(llm._ctx.ctx, pointers, len(put), scales) == 0


# -- noticed --------------------------------------------------------------------------------------


CHANGES = {
    "control vector": (steer, lambda llm: steer(llm, None)),
    "adapter": (lambda llm: adapt(llm, (load(llm, llm.lora), 1.0)), adapt),
    "scale of an adapter": (lambda llm: adapt(llm, (load(llm, llm.lora), 0.02)), adapt),
    "mode": (
        lambda llm: native.llama_set_causal_attn(llm._ctx.ctx, False),
        lambda llm: native.llama_set_causal_attn(llm._ctx.ctx, True),
    ),
}
"""Changes of the numbers that a context computes, and how each is taken back."""


@pytest.mark.parametrize(
    ("arch", "change"),
    [
        *(("qwen35", change) for change in ("control vector", "adapter", "scale of an adapter")),
        *(("gemma3", change) for change in ("control vector", "adapter")),
        *(pytest.param(arch, "control vector", marks=pytest.mark.full) for arch in ("llama", "mamba")),
        ("llama", "mode"),
    ],
)
def test_a_change_of_the_context_changes_the_next_answer(open_model, fresh, lora, arch, change):
    put, back = CHANGES[change]

    def changed(llm):
        llm.lora = lora(arch)
        put(llm)

    want, other = fresh(PROMPT, arch), fresh(PROMPT, arch, changed)
    assert want != other, "or the test proves nothing"
    llm = open_model(arch)
    assert take(llm, PROMPT) == want
    for _ in range(2):
        changed(llm)
        assert take(llm, PROMPT) == other
        assert llm.last_request.cached == 0
        back(llm)
        assert take(llm, PROMPT) == want


def test_the_adapter_that_a_model_is_opened_with_names_it_by_its_content(open_model, lora, tmp_path):
    def opened(path, scale=0.3):
        return open_model(lora_path=str(path), lora_scale=scale).runner.live.fingerprint

    copy = shutil.copy(lora(), tmp_path / "copy.gguf")
    assert opened(lora()) == opened(copy)
    others = {opened(lora(), 0.5), opened(lora(seed=2)), open_model().runner.live.fingerprint}
    assert len(others - {opened(lora())}) == 3


def test_an_adapter_that_is_put_on_later_has_no_equal(open_model, lora):
    names = set()
    for _ in range(2):
        llm = open_model()
        adapter = load(llm, lora())
        for put in ((adapter, 0.3),), ():
            adapt(llm, *put)
            names.add(llm.runner.live.fingerprint)
    names.add(llm.runner.live.fingerprint)
    assert len(names) == 4
    assert llm.runner.live.identity.computation.nameless, "nothing of it leaves the process"


def test_another_models_adapter_is_its_own_affair(open_model):
    ours, stock = open_model(), open_model(cls=llama_cpp.Llama)
    other = open_model()
    before = ours.runner.live.fingerprint
    steer(stock)
    steer(other)
    assert ours.runner.live.fingerprint == before
    assert other.runner.live.fingerprint != before


# -- in the middle of something --------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_an_answer_goes_on_as_stock_does_and_is_not_stored(open_model, fresh, arch):
    """The prompt without, the answer with: what is in memory is a mixture, and of no use to anybody else."""

    def half(llm):
        stream = llm.generate(PROMPT, temp=0.0)
        answer = [next(stream)]
        steer(llm)
        answer += itertools.islice(stream, 120)
        stream.close()
        return answer

    ours, stock = open_model(arch), open_model(arch, llama_cpp.Llama)
    answer = half(ours)
    assert answer == half(stock)
    longer = [*PROMPT, *answer, 3]
    assert take(ours, longer) == fresh(longer, arch, steer)
    assert ours.last_request.cached == 0
    steer(ours, None)
    assert take(ours, longer) == fresh(longer, arch)
    assert ours.last_request.cached in (0, len(PROMPT))


@pytest.mark.parametrize("at", [1, 3])
def test_a_change_by_another_thread_inside_a_batch_is_noticed(open_model, fresh, at):
    """Checkpoints that wait for the end of their prompt are not stored under the new name."""
    llm, long = open_model(n_ctx=1024, n_batch=64), (PROMPT * 6)[:460]
    context, calls = llm._ctx, itertools.count(1)
    decode = context.decode

    def steered(batch):
        decode(batch)
        if next(calls) == at:
            steer(llm)

    context.decode = steered
    take(llm, long)
    del context.decode
    assert take(llm, long) == fresh(long, prepare=steer, n_ctx=1024)
    assert llm.last_request.cached == 0
    steer(llm, None)
    assert take(llm, long) == fresh(long, n_ctx=1024)


# -- not noticed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_a_salt_separates_changes_that_go_unnoticed(open_model, fresh, arch):
    setter = unseen("llama_set_adapter_cvec")
    llm = open_model(arch)
    assert take(llm, PROMPT) == fresh(PROMPT, arch)
    steer(llm, 1, setter)
    llm.cache_salt = "steered"
    assert take(llm, PROMPT) == fresh(PROMPT, arch, steer)
    steer(llm, None, setter)
    llm.cache_salt = ""
    assert take(llm, PROMPT) == fresh(PROMPT, arch)
    assert llm.last_request.cached == (0 if arch in ("llama", "gemma3") else len(PROMPT))


def test_a_salt_ends_the_request_that_is_suspended(open_model, fresh):
    llm = open_model()
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    llm.cache_salt = "other"
    take(llm, PROMPT)
    assert llm.last_request.cached == 0
    llm.cache_salt = ""
    assert take(llm, PROMPT) == fresh(PROMPT)
    assert llm.last_request.cached == len(PROMPT)
