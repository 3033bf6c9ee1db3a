"""What the trial finds out about each kind of memory."""

from dataclasses import replace

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.engine import loaded
from llamahybrid.memory.paging import Pager
from llamahybrid.memory.profile import NO_MEMORY, MemoryProfile, probe

from .conftest import PROMPT


def profile_of(path, **kw):
    llm = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False, **kw)
    found = probe(llm._ctx, bool(llm.context_params.swa_full))
    counters = llama_cpp.llama_perf_context(llm.ctx)
    assert llama_cpp.llama_memory_seq_pos_max(llm._ctx.memory, 0) == -1, "the trial left tokens behind"
    assert (counters.n_p_eval, counters.n_eval) == (1, 1), "the trial shows in the counters"
    return found


@pytest.mark.parametrize(
    ("arch", "cuttable", "checkpoints", "attention"),
    [
        ("llama", True, False, False),
        ("gemma3", True, True, True),
        ("mamba", False, True, False),
        ("rwkv7", False, True, False),
        ("jamba", False, True, True),
        ("qwen35", False, True, True),
        ("lfm2", False, True, True),
    ],
)
def test_each_kind_of_memory_is_recognised(tiny_model, arch, cuttable, checkpoints, attention):
    found = profile_of(tiny_model(arch), swa_full=False)
    assert found.linear
    assert (found.cuttable, found.needs_checkpoints, found.needs_attention) == (
        cuttable,
        checkpoints,
        attention,
    )


def test_a_full_size_window_cache_needs_no_checkpoints(tiny_model):
    assert not profile_of(tiny_model("gemma3"), swa_full=True).needs_checkpoints


def test_memory_whose_size_follows_no_line_is_not_restored(tiny_model):
    found = profile_of(tiny_model("deepseek4"))
    assert found.has_memory
    assert not found.linear
    assert not found.needs_checkpoints


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "qwen35", "qwen4exp", "deepseek4"])
def test_whether_a_copy_comes_late_is_seen(open_model, arch):
    llm = open_model(arch, n_parallel=2)
    late = arch == "deepseek4" and "0019" not in loaded.patches()
    assert llm.slots.all[0].evaluation.runner.live.profile.copies_late == late
    assert all(slot.evaluation.runner.live.native.positions() == (-1, -1) for slot in llm.slots.all)


def test_an_embedding_model_without_memory_stays_out(tiny_model):
    llm = llama_cpp.Llama(
        str(tiny_model("bert", vocab="bert-bge")), n_ctx=64, n_threads=1, embedding=True, verbose=False
    )
    assert probe(llm._ctx, True) == NO_MEMORY


@pytest.mark.parametrize("n_batch", [1, 3])
def test_the_trial_fits_into_any_batch(open_model, n_batch):
    llm = open_model(n_ctx=256, n_batch=n_batch)
    llm.eval(PROMPT)
    assert llm.runner.live.fault() is None


def rule(**kw):
    return MemoryProfile(**{"has_memory": True, "cuttable": True, "attention_per_token": 4, **kw})


@pytest.mark.parametrize(
    ("profile", "n", "positions", "sound"),
    [
        (rule(), 5, (0, 4), True),
        (rule(), 5, (0, 3), False),
        (rule(), 5, (1, 4), False),
        (rule(), 0, (-1, -1), True),
        (rule(keeps_tip_only=True), 5, (4, 4), True),
        (rule(keeps_tip_only=True), 5, (0, 4), False),
        (rule(keeps_tip_only=True), 5, (5, -1), False),
        (rule(window=4), 20, (16, 19), True),
        (rule(window=4), 20, (17, 19), False),
        (rule(window=4), 20, (-1, 19), False),
    ],
)
def test_positions_must_be_those_of_the_memorys_kind(profile, n, positions, sound):
    assert (profile.position_fault(n, *positions) is None) is sound


def test_a_window_is_cut_no_deeper_than_it_reaches():
    assert rule(window=8).cut_floor(100, 84) == 92
    assert rule(window=8).cut_floor(100, 0) == 0
    assert rule(cuttable=False).cut_floor(100, 99) == 100


@pytest.mark.parametrize(
    ("arch", "options", "whole"),
    [
        ("llama", {}, True),
        ("qwen3", {}, True),
        ("gemma3", {}, True),
        ("gpt-oss", {}, True),
        ("gemma3", {"swa_full": False}, False),
        ("gemma3", {"n_parallel": 2}, False),  # others overwrite what lies behind its window
        ("llama", {"n_parallel": 2}, True),
        ("llama", {"paging": False}, False),
        ("qwen35", {}, False),
        ("mamba", {}, False),
        ("deepseek4", {}, False),
    ],
)
def test_attention_is_all_of_the_state_where_a_cut_is_all_it_takes(tiny_model, arch, options, whole):
    window = {"window": 16} if arch in ("gemma3", "gpt-oss") else {}
    llm = Llama(str(tiny_model(arch, **window)), n_ctx=256, n_threads=1, verbose=False, **options)
    profile = llm.runner.live.profile
    assert (profile.attention_is_all, llm.runner.live.view().attention_is_all) == (whole, whole)
    assert not (profile.attention_is_all and profile.needs_checkpoints)
    assert profile.keeps_chats == (arch not in ("deepseek4", "llama") or whole)
    llm.close()


def test_what_cannot_be_verified_is_not_put_back_from_attention_alone(open_model):
    live = open_model("llama").runner.live
    live.profile = replace(live.profile, linear=False)
    assert not live.view().attention_is_all


def test_a_window_shorter_than_the_trial_is_not_paged(tiny_model):
    llm = Llama(str(tiny_model("gemma3", window=4)), n_ctx=256, n_threads=1, verbose=False)
    profile = llm.runner.live.profile
    assert (profile.window, profile.pager, profile.attention_is_all) == (4, None, False)
    llm.close()


def test_a_pager_that_misses_layers_does_not_serve(tiny_model, monkeypatch):
    """Full attention alone is what it takes of a hybrid."""
    learn = Pager.learn
    monkeypatch.setattr(Pager, "learn", lambda ctx, *span, **_: learn(ctx, *span))
    llm = Llama(str(tiny_model("gemma3", window=16)), n_ctx=256, n_threads=1, verbose=False)
    profile = llm.runner.live.profile
    assert (profile.attention_is_all, profile.pager) == (False, None)
    llm.close()
