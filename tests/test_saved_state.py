"""Whole states: saved, loaded and refused; in upstream's caches; and out of the process."""

import pickle
import shutil

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_cache import BaseLlamaCache

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


def keys(cache):
    return list(cache.cache_state if isinstance(cache, llama_cpp.LlamaRAMCache) else cache.cache)


def text(llm, prompt):
    return llm.create_completion(prompt, **ASKED)["choices"][0]["text"]


FOREIGN = [
    ({}, {"n_ctx": 1024}),
    ({}, {"seed": 1}),
    ({}, {"arch": "qwen35"}),
    ({"arch": "qwen35"}, {"arch": "qwen35", "n_ctx": 1024}),
    ({}, {"type_k": llama_cpp.GGML_TYPE_F32}),
    ({}, {"cache_salt": "another"}),
]


@pytest.mark.parametrize(
    ("one", "other", "disk"),
    [*((*pair, False) for pair in FOREIGN), (*FOREIGN[0], True), (*FOREIGN[2], True)],
)
def test_a_state_that_does_not_fit_is_a_miss_and_stays(open_model, tmp_path, one, other, disk):
    cache = llama_cpp.LlamaDiskCache(str(tmp_path)) if disk else llama_cpp.LlamaRAMCache()
    a, b = open_model(**one), open_model(**other)
    a.set_cache(cache)
    b.set_cache(cache)
    text(a, PROMPT)
    (key,) = keys(cache)
    plain = {k: v for k, v in other.items() if k != "cache_salt"}
    assert text(b, LONGER) == text(open_model(cls=llama_cpp.Llama, **plain), LONGER)
    assert b.last_request.cached == 0
    reader = open_model(**one)
    reader.set_cache(cache)
    text(reader, [*key, 5])
    assert reader.last_request.cached == len(key) - 1, "its owner finds it there"


@pytest.mark.parametrize(("one", "other"), [({}, {"logits_all": True}), ({"logits_all": True}, {})])
@pytest.mark.parametrize("n", [4, 10])
def test_rows_of_scores_are_used_for_their_own_tokens(open_model, one, other, n):
    cache = llama_cpp.LlamaRAMCache()
    prompt = "Once upon a time " * n
    a, b = (open_model(n_batch=64, stock_logprobs=True, **more) for more in (one, other))
    a.set_cache(cache)
    b.set_cache(cache)
    text(a, prompt)
    asked = {**ASKED, **({"logprobs": 2, "echo": True} if other else {})}
    stock = open_model(cls=llama_cpp.Llama, n_batch=64, **other)
    mine, reference = (x.create_completion(prompt + "and", **asked)["choices"][0] for x in (b, stock))
    assert mine["text"] == reference["text"]
    if other:
        numbers, expected = (x["logprobs"]["token_logprobs"][1:] for x in (mine, reference))
        assert np.allclose(numbers, expected, atol=1e-3, rtol=0)


def test_a_damaged_state_in_a_cache_is_a_miss(open_model):
    cache, llm = llama_cpp.LlamaRAMCache(), open_model()
    llm.set_cache(cache)
    text(llm, PROMPT)
    (state,) = cache.cache_state.values()
    state.llama_state = state.llama_state[:-1] + bytes([state.llama_state[-1] ^ 1])
    other = open_model()
    other.set_cache(cache)
    assert text(other, LONGER) == text(open_model(cls=llama_cpp.Llama), LONGER)


@pytest.mark.parametrize("other", [{"arch": "gemma3"}, {"arch": "qwen35"}, {"n_ctx": 256}])
def test_a_state_of_stock_that_the_library_refuses_is_a_miss(open_model, other):
    """States that upstream saved are not sealed: only the library can tell."""
    cache, stock = llama_cpp.LlamaRAMCache(), open_model(cls=llama_cpp.Llama, n_ctx=1024)
    stock.set_cache(cache)
    text(stock, PROMPT)
    llm = open_model(**other)
    llm.set_cache(cache)
    assert text(llm, LONGER) == text(open_model(cls=llama_cpp.Llama, **other), LONGER)
    assert take(llm, LONGER) == take(open_model(cls=llama_cpp.Llama, **other), LONGER)


def test_a_refused_load_leaves_room_for_the_whole_context(open_model):
    stock = open_model("gemma3", llama_cpp.Llama, n_ctx=256)
    stock.eval(PROMPT)
    llm = open_model(n_ctx=1024)
    with pytest.raises(RuntimeError):
        llm.load_state(stock.save_state())
    assert llm.n_tokens == 0
    long = (PROMPT * 12)[:900]
    assert take(llm, long) == take(open_model(cls=llama_cpp.Llama, n_ctx=1024), long)


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


def test_a_damaged_or_foreign_state_is_refused_and_nothing_lost(open_model):
    llm = open_model("qwen35")
    take(llm, PROMPT)
    state = llm.save_state()
    state.llama_state = state.llama_state[:-1] + bytes([state.llama_state[-1] ^ 1])
    with pytest.raises(SnapshotError, match="damaged"):
        llm.load_state(state)
    state.llama_state = state.llama_state[:-1]
    with pytest.raises(SnapshotError, match="truncated"):
        llm.load_state(state)
    with pytest.raises(SnapshotError, match="another model"):
        open_model("jamba").load_state(llm.save_state())
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


@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_upstreams_caches_still_serve(open_model, fresh, tmp_path, arch, kind):
    cache = llama_cpp.LlamaRAMCache() if kind == "ram" else llama_cpp.LlamaDiskCache(str(tmp_path))
    writer, reader = open_model(arch), open_model(arch)
    writer.set_cache(cache)
    reader.set_cache(cache)
    said = text(writer, PROMPT)
    assert text(reader, PROMPT) == text(writer, PROMPT) == said
    assert take(reader, PROMPT) == fresh(PROMPT, arch=arch)


class Duck:
    """All that upstream asks of a cache."""

    def __init__(self):
        self.states, self.asked = {}, 0

    def __getitem__(self, key):
        self.asked += 1
        common = llama_cpp.Llama.longest_token_prefix
        return self.states[max(self.states, key=lambda known: common(known, key), default=None)]

    def __setitem__(self, key, state):
        self.states[tuple(key)] = state


class Base(Duck, BaseLlamaCache):
    """As the base class wants it, which finds no keys."""

    cache_size = 0

    def __contains__(self, key):
        return bool(self.states)


class Other(Duck, llama_cpp.LlamaRAMCache):
    """Another index than the one that it derives from."""

    def __init__(self):
        llama_cpp.LlamaRAMCache.__init__(self)
        Duck.__init__(self)


@pytest.mark.parametrize("arch", ["gemma3", "qwen35"])
@pytest.mark.parametrize("kind", [Duck, Base, Other])
def test_a_cache_of_the_users_own_is_asked(open_model, fresh, arch, kind):
    cache = kind()
    asked = []
    for cls in (llama_cpp.Llama, Llama):
        writer, reader = open_model(arch, cls), open_model(arch, cls)
        for llm in (writer, reader):
            llm.set_cache(cache)
        text(writer, PROMPT)
        (key,) = cache.states
        assert text(reader, [*key, 5]) == text(open_model(arch, llama_cpp.Llama), [*key, 5])
        asked.append(cache.asked)
        cache.states.clear()
        cache.asked = 0
    assert asked == [2, 2], "as stock asks it"
    assert reader.last_request.cached == len(key) - 1
    reader.set_cache(cache)
    text(writer, PROMPT)
    (state,) = cache.states.values()
    text(reader, OTHER)
    assert text(reader, PROMPT[:40]) == text(open_model(arch, llama_cpp.Llama), PROMPT[:40])
    assert take(reader, [*OTHER, 4]) == fresh([*OTHER, 4], arch=arch)
    assert state in cache.states.values()


def test_an_empty_dictionary_is_no_cache_as_with_upstream(open_model):
    llm = open_model()
    llm.cache = nothing = {}
    assert text(llm, PROMPT) == text(open_model(cls=llama_cpp.Llama), PROMPT)
    assert llm.cache is nothing
    assert not nothing


@pytest.mark.parametrize("more", [{}, {"n_parallel": 2}, {"prompt_cache": False}])
def test_cache_attribute_is_the_cache_that_was_set(open_model, more):
    llm = open_model(**more)
    assert llm.cache is None
    cache = llama_cpp.LlamaRAMCache()
    llm.set_cache(cache)
    text(llm, PROMPT)
    assert llm.cache is cache
    llm.cache = llm.cache
    assert llm.cache is cache
    llm.set_cache(None)
    assert llm.cache is None
