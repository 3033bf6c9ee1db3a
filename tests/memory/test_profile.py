"""The trial's result for each kind of memory."""

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.memory.profile import probe

from .conftest import PROMPT

pytestmark = [pytest.mark.patched]


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
        pytest.param(*("rwkv7", False, True, False), marks=pytest.mark.full),
        pytest.param(*("jamba", False, True, True), marks=pytest.mark.full),
        ("qwen35", False, True, True),
        pytest.param(*("lfm2", False, True, True), marks=pytest.mark.full),
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


def test_memory_of_irregular_size_is_not_restored(tiny_model):
    found = profile_of(tiny_model("deepseek4"))
    assert found.has_memory
    assert not found.linear
    assert not found.needs_checkpoints


@pytest.mark.parametrize("n_batch", [1, 3])
def test_the_trial_fits_into_any_batch(open_model, n_batch):
    llm = open_model(n_ctx=256, n_batch=n_batch)
    llm.eval(PROMPT)
    assert llm.runner.live.fault() is None


@pytest.mark.parametrize(
    ("arch", "options", "whole"),
    [
        ("llama", {}, True),
        ("gemma3", {}, True),
        ("gemma3", {"swa_full": False}, False),
        ("gemma3", {"n_parallel": 2}, False),  # a stream's state leaves out what lies behind it
        ("llama", {"n_parallel": 2}, True),
        ("llama", {"paging": False}, False),
        ("qwen35", {}, False),
        ("mamba", {}, False),
        ("deepseek4", {}, False),
    ],
)
def test_attention_is_all_of_the_state_where_a_cut_is_enough(tiny_model, arch, options, whole):
    window = {"window": 16} if arch in ("gemma3", "gpt-oss") else {}
    llm = Llama(str(tiny_model(arch, **window)), n_ctx=256, n_threads=1, verbose=False, **options)
    profile = llm.runner.live.profile
    assert (profile.attention_is_all, llm.runner.live.view().attention_is_all) == (whole, whole)
    assert not (profile.attention_is_all and profile.needs_checkpoints)
    assert profile.keeps_chats == (arch not in ("deepseek4", "llama") or whole)
    llm.close()


def test_a_window_shorter_than_the_trial_is_not_paged(tiny_model):
    llm = Llama(str(tiny_model("gemma3", window=4)), n_ctx=256, n_threads=1, verbose=False)
    profile = llm.runner.live.profile
    assert (profile.window, profile.pager, profile.attention_is_all) == (4, None, False)
    llm.close()
