"""Whole states: saved, loaded and refused, and out of the process."""

import pickle
import shutil

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.engine import content
from llamahybrid.errors import SnapshotError
from llamahybrid.memory import model_files
from tests.conftest import SETTINGS, take

PROMPT = [(7 * i + 1) % 200 for i in range(80)]
LONGER = [*PROMPT, 5]
OTHER = [(11 * i + 5) % 200 for i in range(50)]
KINDS = (
    "qwen35",
    "gemma3",
    *(pytest.param(arch, marks=pytest.mark.full) for arch in ("llama", "mamba", "jamba")),
)
ASKED = dict(max_tokens=4, temperature=0.0)


@pytest.fixture
def open_model(tiny_model):
    def opener(arch="llama", cls=Llama, path=None, seed=0, **kw):
        model = path or tiny_model(arch, seed=seed)
        return cls(str(model), **{**SETTINGS, **kw})

    return opener


def text(llm, prompt):
    return llm.create_completion(prompt, **ASKED)["choices"][0]["text"]


# -- states that do not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"n_ctx": 1024}),
        ({}, {"seed": 1}),
        ({}, {"arch": "qwen35"}),
        ({"arch": "qwen35"}, {"arch": "qwen35", "n_ctx": 1024}),
        ({}, {"type_k": llama_cpp.GGML_TYPE_F32}),
        ({}, {"cache_salt": "another"}),
    ],
)
def test_a_state_of_another_model_or_context_is_refused_and_nothing_lost(open_model, one, other):
    saved, llm = open_model(**one), open_model(**other)
    saved.eval(PROMPT)
    state = saved.save_state()
    take(llm, PROMPT)
    with pytest.raises(SnapshotError, match="another model"):
        llm.load_state(state)
    plain = {k: v for k, v in other.items() if k != "cache_salt"}
    assert text(llm, LONGER) == text(open_model(cls=llama_cpp.Llama, **plain), LONGER)
    assert llm.last_request.cached == len(PROMPT)
    take(saved, OTHER)
    saved.load_state(state)
    take(saved, LONGER)
    assert saved.last_request.cached == len(PROMPT), "its owner takes it"


@pytest.mark.parametrize(("one", "other"), [({}, {"logits_all": True}), ({"logits_all": True}, {})])
@pytest.mark.parametrize("n", [4, 10])
def test_rows_of_scores_are_used_for_their_own_tokens(open_model, one, other, n):
    prompt = "Once upon a time " * n
    a, b = (open_model(n_batch=64, **more) for more in (one, other))
    text(a, prompt)
    b.load_state(a.save_state())
    stock = open_model(cls=llama_cpp.Llama, n_batch=64, **other)
    assert text(b, prompt + "and") == text(stock, prompt + "and")
    if other:
        mine, reference = (each.scores[: each.n_tokens] for each in (b, stock))
        assert np.allclose(mine, reference, atol=1e-3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"n_ctx": 1024}, {"arch": "gemma3"}),
        ({"n_ctx": 1024}, {"arch": "qwen35"}),
        ({"arch": "gemma3", "n_ctx": 256}, {"n_ctx": 1024}),
    ],
)
def test_a_state_of_stock_that_the_library_refuses_leaves_the_whole_context(open_model, one, other):
    """States that upstream saved are not sealed: only the library can tell."""
    stock, llm = open_model(cls=llama_cpp.Llama, **one), open_model(**other)
    stock.eval(PROMPT)
    with pytest.raises(RuntimeError):
        llm.load_state(stock.save_state())
    assert llm.n_tokens == 0
    long = (PROMPT * 12)[: llm.n_ctx() - 50]
    assert take(llm, long) == take(open_model(cls=llama_cpp.Llama, **other), long)


def test_a_state_of_another_vocabulary_changes_nothing(open_model):
    llm = open_model()
    take(llm, PROMPT)
    state = open_model(cls=llama_cpp.Llama).save_state()
    state.scores = state.scores[:, :-1]
    with pytest.raises(SnapshotError, match="scores of shape"):
        llm.load_state(state)
    take(llm, LONGER)
    assert llm.last_request.cached == len(PROMPT)


# -- states that leave the process -----------------------------------------------------------------


@pytest.fixture
def large(monkeypatch, tmp_path):
    """Any file is a large one, that the file system has known for long."""
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(content, "SMALL", 0)
    monkeypatch.setattr(model_files, "SMALL", 0)
    monkeypatch.setattr(content, "SETTLED_SECONDS", 0)


def test_a_pickled_state_is_named_by_content(open_model, tiny_model, tmp_path, large):
    path = tiny_model("llama")
    copy = shutil.copy(path, tmp_path / "copy.gguf")
    llm = open_model(path=path)
    llm.eval(PROMPT)
    state = llm.save_state()
    moved = open_model(path=copy)
    with pytest.raises(SnapshotError, match="another model"):
        moved.load_state(state)  # within the process nobody has read the files
    moved.load_state(pickle.loads(pickle.dumps(state)))
    take(moved, LONGER)
    assert moved.last_request.cached == len(PROMPT)
    with pytest.raises(SnapshotError, match="another model"):
        open_model(seed=1).load_state(pickle.loads(pickle.dumps(state)))


def test_a_pickled_state_belongs_to_its_adapters(open_model, large):
    llm = open_model(cache_salt="one")
    llm.eval(PROMPT)
    state = llm.save_state()
    llm.cache_salt = "two"
    state = pickle.loads(pickle.dumps(state))
    with pytest.raises(SnapshotError, match="another model"):
        llm.load_state(state)
    llm.cache_salt = "one"
    llm.load_state(state)


# -- saved and loaded ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_saved_state_continues_at_its_end(open_model, fresh, arch):
    llm = open_model(arch)
    llm.eval(PROMPT)
    state = pickle.loads(pickle.dumps(llm.save_state()))
    take(llm, OTHER)
    llm.load_state(state)
    assert llm.n_tokens == len(PROMPT)
    assert take(llm, PROMPT) == fresh(PROMPT, arch=arch)
    assert llm.last_request.left <= 1
    other = open_model(arch)
    other.load_state(state)
    assert take(other, [*PROMPT, 4]) == fresh([*PROMPT, 4], arch=arch)
    assert other.last_request.cached == len(PROMPT)


def test_a_state_has_the_seed_that_was_set_last(open_model):
    llm = open_model()
    llm.create_completion(PROMPT, seed=3, **ASKED)
    llm.set_seed(7)
    state = llm.save_state()
    llm.set_seed(8)
    llm.load_state(state)
    assert (state.seed, llm._seed) == (7, 7)


@pytest.mark.parametrize("arch", KINDS)
def test_a_state_that_stock_saved_is_taken(open_model, fresh, arch):
    stock = open_model(arch, llama_cpp.Llama)
    stock.eval(PROMPT)
    llm = open_model(arch)
    llm.load_state(stock.save_state())
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4], arch=arch)
    assert llm.last_request.cached == len(PROMPT)


def test_a_damaged_state_is_refused_and_nothing_lost(open_model):
    llm = open_model("qwen35")
    take(llm, PROMPT)
    state = llm.save_state()
    state.llama_state = state.llama_state[:-1] + bytes([state.llama_state[-1] ^ 1])
    with pytest.raises(SnapshotError, match="damaged"):
        llm.load_state(state)
    state.llama_state = state.llama_state[:-1]
    with pytest.raises(SnapshotError, match="truncated"):
        llm.load_state(state)
    take(llm, PROMPT)
    assert llm.last_request.cached == len(PROMPT)


@pytest.mark.parametrize("cls", [Llama, llama_cpp.Llama])
def test_a_state_cut_short_is_caught_as_with_upstream(open_model, cls):
    llm = open_model(cls=cls)
    llm.eval(PROMPT)
    state = llm.save_state()
    state.llama_state, state.llama_state_size = state.llama_state[:100], 100
    with pytest.raises(RuntimeError):
        llm.load_state(state)


def test_a_state_that_the_library_does_not_take_leaves_nothing_wrong(open_model, fresh):
    stock = open_model("qwen35", llama_cpp.Llama)
    stock.eval(OTHER)
    state = stock.save_state()
    state.llama_state = state.llama_state[:-8]
    state.llama_state_size -= 8
    llm = open_model("qwen35")
    llm.eval(PROMPT)
    with pytest.raises(RuntimeError):
        llm.load_state(state)
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4])


def test_a_load_that_reports_failure_is_not_believed(open_model, fresh, monkeypatch):
    stock = open_model("qwen35", llama_cpp.Llama)
    stock.eval((OTHER * 2)[: len(PROMPT)])
    llm = open_model("qwen35")
    llm.eval(PROMPT)
    load = llama_cpp.llama_cpp.llama_state_set_data
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_state_set_data", lambda *a: load(*a) and 0)
    with pytest.raises(RuntimeError):
        llm.load_state(stock.save_state())
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4])


# -- upstream's caches -----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"n_parallel": 2}, {"prompt_cache": False}])
def test_a_cache_of_upstreams_is_used_where_there_is_no_prompt_cache(open_model, caplog, more):
    llm, cache, right = open_model(**more), llama_cpp.LlamaRAMCache(), text(open_model(), PROMPT)
    assert llm.cache is None
    llm.set_cache(cache)
    assert llm.cache is cache
    assert text(llm, PROMPT) == text(llm, PROMPT) == right
    assert ("set_cache" in caplog.text) == (not cache.cache_state) == (llm.prompt_cache is not None)
    llm.set_cache(None)
    assert llm.cache is None
