"""Tiny models: every architecture loads, remembers, speaks, and comes out the same every time."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from llamahybrid import UnknownArchitecture, tiny
from tests.tiny.loading import CHAT, TinyModel, load

DECODERS = [
    pytest.param(arch, marks=[] if arch in ("qwen35", "gemma3") else pytest.mark.full)
    for arch in tiny.decoders()
]


def logits(llm: llama_cpp.Llama, tokens: list[int]) -> npt.NDArray[np.float32]:
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(tokens)
    return np.array(llm.scores[: len(tokens)])


def test_the_loaded_library_makes_all_architectures() -> None:
    assert tiny.impossible() == {}


@pytest.mark.parametrize("arch", DECODERS)
def test_logits_depend_on_every_earlier_token(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch), logits_all=True)
    tokens = np.random.default_rng(0).integers(ord(" "), ord("~"), 40).tolist()
    first = logits(llm, tokens)
    assert np.isfinite(first).all()
    assert len(set(first.argmax(axis=1))) > 3
    again = logits(llm, tokens)
    np.testing.assert_array_equal(again, first)
    tokens[2] += 1
    other = logits(llm, tokens)
    np.testing.assert_array_equal(other[:2], first[:2])
    assert np.abs(other[-1] - first[-1]).max() > 1e-3 * np.ptp(first[-1])
    llm.close()


@pytest.mark.parametrize("arch", DECODERS)
def test_logits_hardly_depend_on_batch_borders(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch))
    tokens = np.random.default_rng(1).integers(ord(" "), ord("~"), 60).tolist()
    n_vocab = llm.n_vocab()

    def last(*cuts: int) -> npt.NDArray[np.float32]:
        llm.reset()
        llm._ctx.kv_cache_clear()
        for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
            llm.eval(tokens[start:end])
        return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (n_vocab,)).copy()

    whole = last()
    for cuts in ((30,), (1, 17, 59), tuple(range(40, 60))):
        assert np.abs(last(*cuts) - whole).max() <= 1e-3 * np.ptp(whole)
    llm.close()


@pytest.mark.parametrize("arch", DECODERS)
def test_every_architecture_answers_a_chat(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch))
    answer = llm.create_chat_completion(CHAT, max_tokens=32, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "length"
    text = answer["choices"][0]["message"]["content"]
    generated = llm.input_ids[llm.n_tokens - 31 : llm.n_tokens].tolist()  # the last one is not decoded
    assert llm.tokenize(text.encode(), add_bos=False, special=True)[:-1] == generated
    llm.close()


@pytest.mark.parametrize("arch", [*DECODERS, pytest.param("bert", marks=pytest.mark.full)])
def test_the_same_arguments_make_the_same_file(arch: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    again = tiny.make(arch, tmp_path / "again.gguf")
    assert again.read_bytes() == tiny_model(arch).read_bytes()
    assert list(tmp_path.iterdir()) == [again]


def test_the_seed_changes_the_weights(tiny_model: TinyModel) -> None:
    one, two = tiny_model("qwen35").read_bytes(), tiny_model("qwen35", seed=1).read_bytes()
    assert len(one) == len(two)
    assert one != two


def test_bert_embeds(tiny_model: TinyModel) -> None:
    llm = load(tiny_model("bert"), embedding=True)
    one, two = (np.array(llm.embed(text)) for text in ("a prefix", "a suffix"))
    assert one.shape == (64,)
    assert np.isfinite(one).all()
    assert np.abs(one - two).max() > 1e-3
    llm.close()


@pytest.mark.parametrize("arch", ["qwen35"])
def test_params_are_met(arch: str, tiny_model: TinyModel) -> None:
    weights = tiny_model(arch, params=5_000_000).stat().st_size / 2  # two bytes a weight, nearly all of them
    assert 0.8 * 5e6 < weights < 1.2 * 5e6


def test_params_need_room_to_choose() -> None:
    with pytest.raises(ValueError, match="leave embd or layers open"):
        tiny.make("llama", Path("unwritten"), params=10**6, embd=64, layers=4)


@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("llama", {"embd": 100}),
        ("llama", {"heads": 3}),
        ("rwkv7", {"embd": 96, "heads": 3}),
        ("qwen35", {"layers": 1}),
        ("deepseek4", {"layers": 3}),
    ],
)
def test_sizes_that_would_kill_the_process_are_refused(
    arch: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"multiple of|layers|two or more"):
        tiny.make(arch, tmp_path / "x.gguf", **sizes)
    assert not list(tmp_path.iterdir())


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError):
        tiny.make("qwen35", pipe)
    assert pipe.is_fifo()


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="none of the architectures"):
        tiny.make("gpt9", tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_the_library_says_why_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(tiny.SPECS, "gpt9", tiny.SPECS["llama"])
    assert "unknown model architecture: 'gpt9'" in tiny.impossible()["gpt9"]
    assert capfd.readouterr().err == ""
