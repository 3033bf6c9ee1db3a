"""Hyper-parameters: what makes each architecture's memory special is there."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest

from tests.tiny.loading import TinyModel, load

HYBRID = [
    *("jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"),
    *("qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe", "qwen4exp"),
    *("deepseek4", "minimax-01"),
]
RECURRENT = ["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"]


@pytest.mark.full
@pytest.mark.parametrize("arch", ["falcon-h1", "mamba2", "nemotron_h", "granitehybrid"])
def test_odd_number_of_heads_is_decoded(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch, embd=96, heads=3))
    llm.eval(llm.tokenize(b"any text"))
    llm.close()


@pytest.mark.parametrize(("arch", "window"), [("gemma3", 24), ("lfm2", 24), ("llama", None)])
def test_the_window_is_set(arch: str, window: int | None, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch, window=24))
    assert llm.metadata.get(f"{arch}.attention.sliding_window") == (window and str(window))
    llm.close()


@pytest.mark.parametrize("arch", ["qwen35", pytest.param("nemotron_h", marks=pytest.mark.full)])
def test_prediction_layers_come_last(arch: str, tiny_model: TinyModel) -> None:
    path = tiny_model(arch, predictors=1)
    assert b"blk.4.nextn.eh_proj.weight" in path.read_bytes()
    assert b"nextn" not in tiny_model(arch).read_bytes()
    llm = load(path, logits_all=True)
    llm.eval(range(20))
    assert np.isfinite(llm.scores[: llm.n_tokens]).all()
    llm.close()


def test_gemma3_has_windowed_and_full_layers(tiny_model: TinyModel) -> None:
    llm = load(tiny_model("gemma3", window=8), swa_full=False)
    llm.eval(np.random.default_rng(0).integers(ord(" "), ord("~"), 200).tolist())
    whole, windowed = (llama_cpp.llama_state_seq_get_size_ext(llm.ctx, 0, partial) for partial in (0, 1))
    assert 8 * 2 * 2 * 64 < windowed < 0.1 * whole  # 8 cells of 2 layers: K and V of 64 at least
    llm.close()


@pytest.mark.full
@pytest.mark.parametrize("arch", HYBRID + RECURRENT)
def test_recurrent_models_have_recurrent_state(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch))
    kinds = (llama_cpp.llama_model_is_recurrent, llama_cpp.llama_model_is_hybrid)
    assert [bool(kind(llm.model)) for kind in kinds] == [arch in RECURRENT, arch in HYBRID]
    llm.close()
