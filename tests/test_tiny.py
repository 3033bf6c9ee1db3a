"""Tiny models: every architecture loads, remembers, speaks, and comes out the same every time."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from llamahybrid import UnknownArchitecture, tiny
from llamahybrid.capi.gguf import Gguf, _native, quiet
from llamahybrid.errors import EngineError

TinyModel: TypeAlias = Callable[..., Path]

HYBRID = [
    "jamba",
    "falcon-h1",
    "plamo2",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen3next",
    "kimi-linear",
    "bailingmoe3",
    "kimi-k3",
    "glm5-next",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
    "deepseek4",
    "minimax-01",
]
RECURRENT = ["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"]
WINDOWED = ["gemma2", "gemma3", "gemma3n", "gpt-oss", "cohere2", "smallthinker", "step35"]
PLAIN = ["llama", "qwen3"]

CHAT = [
    {"role": "system", "content": "Answer shortly."},
    {"role": "user", "content": "What is a prefix?"},
    {"role": "assistant", "content": "<think>\nlet me see\n</think>\nA beginning."},
    {"role": "user", "content": "And a suffix, naïvely?"},
]


def load(path: Path, **kw: object) -> llama_cpp.Llama:
    with quiet():
        return llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, **kw)


def logits(llm: llama_cpp.Llama, tokens: list[int]) -> npt.NDArray[np.float32]:
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(tokens)
    return np.array(llm.scores[: len(tokens)])


def test_every_architecture_of_interest_is_there() -> None:
    assert set(HYBRID + RECURRENT + WINDOWED + PLAIN) == set(tiny.decoders())
    assert {*tiny.decoders(), "bert"} == set(tiny.architectures())


def test_the_loaded_library_makes_them_all() -> None:
    assert tiny.impossible() == {}


@pytest.mark.parametrize("arch", tiny.decoders())
def test_decodes_and_remembers(arch: str, tiny_model: TinyModel) -> None:
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


@pytest.mark.parametrize("arch", tiny.decoders())
def test_where_a_batch_is_cut_hardly_matters(arch: str, tiny_model: TinyModel) -> None:
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


@pytest.mark.parametrize("arch", tiny.decoders())
def test_chats(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch))
    answer = llm.create_chat_completion(CHAT, max_tokens=32, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "length"
    text = answer["choices"][0]["message"]["content"]
    generated = llm.input_ids[llm.n_tokens - 31 : llm.n_tokens].tolist()  # the last one is not decoded
    assert llm.tokenize(text.encode(), add_bos=False, special=True)[:-1] == generated
    llm.close()


@pytest.mark.parametrize("arch", tiny.architectures())
def test_same_arguments_same_bytes(arch: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    again = tiny.make(arch, tmp_path / "again.gguf")
    assert again.read_bytes() == tiny_model(arch).read_bytes()
    assert list(tmp_path.iterdir()) == [again]


def test_the_seed_changes_the_weights(tiny_model: TinyModel) -> None:
    one, two = tiny_model("qwen35").read_bytes(), tiny_model("qwen35", seed=1).read_bytes()
    assert len(one) == len(two)
    assert one != two


def test_text_survives_the_vocabulary(tiny_model: TinyModel) -> None:
    llm = load(tiny_model("llama"))
    text = "<|im_start|>user\nnaïve ✓ \t\r\n\x00 <think></think><tool_call>{}</tool_call><|im_end|>".encode()
    tokens = llm.tokenize(text, add_bos=False, special=True)
    assert llm.detokenize(tokens, special=True) == text
    assert llm.token_eos() == llm.tokenize(b"<|im_end|>", add_bos=False, special=True)[0]
    assert len(llm.tokenize(b"hi")) == 2  # no BOS
    llm.close()


def prompt(llm: llama_cpp.Llama, messages: list[dict[str, object]], **kw: object) -> str:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = Jinja2ChatFormatter(
        llm.metadata["tokenizer.chat_template"], eos_token="<|im_end|>", bos_token=""
    )
    return template(messages=messages, **kw).prompt


def test_the_template_strips_thinking_from_earlier_answers(tiny_model: TinyModel) -> None:
    llm = load(tiny_model("llama"))
    assert prompt(llm, CHAT) == (
        "<|im_start|>system\nAnswer shortly.<|im_end|>\n"
        "<|im_start|>user\nWhat is a prefix?<|im_end|>\n"
        "<|im_start|>assistant\nA beginning.<|im_end|>\n"
        "<|im_start|>user\nAnd a suffix, naïvely?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    llm.close()


def test_the_template_shows_tools_and_keeps_thinking_while_they_run(tiny_model: TinyModel) -> None:
    llm = load(tiny_model("llama"))
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    text = prompt(llm, messages, tools=[tool])
    system, _, rest = text.partition("<|im_end|>\n")
    assert '"name": "add"' in system
    assert rest == (
        "<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    llm.close()


def test_bert_embeds(tiny_model: TinyModel) -> None:
    llm = load(tiny_model("bert"), embedding=True)
    one, two = (np.array(llm.embed(text)) for text in ("a prefix", "a suffix"))
    assert one.shape == (64,)
    assert np.isfinite(one).all()
    assert np.abs(one - two).max() > 1e-3
    llm.close()


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
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


@pytest.mark.parametrize("arch", ["falcon-h1", "mamba2", "nemotron_h", "granitehybrid"])
def test_an_odd_number_of_heads_is_decoded(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch, embd=96, heads=3))
    llm.eval(llm.tokenize(b"any text"))
    llm.close()


@pytest.mark.parametrize("vocab", ["qwen35", "llama-spm", "bert-bge"])
def test_real_vocabularies(vocab: str, tiny_model: TinyModel) -> None:
    arch = "bert" if vocab == "bert-bge" else "llama"
    llm = load(tiny_model(arch, vocab=vocab, embd=32, layers=2, heads=1), embedding=arch == "bert")
    assert llm.n_vocab() == {"qwen35": 151936, "llama-spm": 32000, "bert-bge": 30522}[vocab]
    text = b"the quick brown fox"
    tokens = llm.tokenize(text, add_bos=False)
    assert len(tokens) < len(text) / 3
    if arch == "llama":
        assert llm.detokenize(tokens).strip() == text
        assert (
            llm.create_completion("the quick", max_tokens=24, temperature=0)["usage"]["completion_tokens"]
            == 24
        )
    if vocab == "qwen35":
        assert "assistant\n<think>" in prompt(llm, CHAT)
        assert "let me see" not in prompt(llm, CHAT)
    llm.close()


@pytest.mark.parametrize(("arch", "window"), [("gemma3", 24), ("lfm2", 24), ("llama", None)])
def test_the_window_is_set(arch: str, window: int | None, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch, window=24))
    assert llm.metadata.get(f"{arch}.attention.sliding_window") == (window and str(window))
    llm.close()


@pytest.mark.parametrize("arch", ["qwen35", "nemotron_h"])
def test_layers_that_predict_are_added_behind_the_others(arch: str, tiny_model: TinyModel) -> None:
    path = tiny_model(arch, predictors=1)
    assert b"blk.4.nextn.eh_proj.weight" in path.read_bytes()
    assert b"nextn" not in tiny_model(arch).read_bytes()
    llm = load(path)
    llm.eval(range(20))
    assert np.isfinite(llm.scores[: llm.n_tokens]).all()


def test_gemma3_has_windowed_and_full_layers(tiny_model: TinyModel) -> None:
    llm = load(tiny_model("gemma3", window=8), swa_full=False)
    llm.eval(np.random.default_rng(0).integers(ord(" "), ord("~"), 200).tolist())
    whole, windowed = (llama_cpp.llama_state_seq_get_size_ext(llm.ctx, 0, partial) for partial in (0, 1))
    assert 8 * 2 * 2 * 64 < windowed < 0.1 * whole  # 8 cells of 2 layers: K and V of 64 at least
    llm.close()


@pytest.mark.parametrize("arch", HYBRID + RECURRENT)
def test_recurrent_ones_have_recurrent_state(arch: str, tiny_model: TinyModel) -> None:
    llm = load(tiny_model(arch))
    kinds = (llama_cpp.llama_model_is_recurrent, llama_cpp.llama_model_is_hybrid)
    assert [bool(kind(llm.model)) for kind in kinds] == [arch in RECURRENT, arch in HYBRID]
    llm.close()


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="none of the architectures"):
        tiny.make("gpt9", tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_the_library_says_why_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(tiny.SPECS, "gpt9", tiny.SPECS["llama"])
    assert "unknown model architecture: 'gpt9'" in tiny.impossible()["gpt9"]
    assert capfd.readouterr().err == ""


def test_the_log_callback_comes_back() -> None:
    LogCallback = llama_cpp.llama_log_callback  # noqa: N806

    def current() -> int | None:
        callback, data = LogCallback(), ctypes.c_void_p()
        llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
        return ctypes.cast(callback, ctypes.c_void_p).value

    before = current()
    with quiet():
        assert current() != before
    assert current() == before


def test_metadata_survives_a_round_trip(tmp_path: Path) -> None:
    values = {"a.n": 7, "a.x": 0.5, "a.yes": True, "a.text": "é", "a.words": ["x", "ü"], "b.other": 1}
    with Gguf() as gguf:
        gguf.set(values)
        gguf.set({"a.ints": np.array([1, 2], np.uint64), "a.list": [3, 4]})
        gguf.write(tmp_path / "x.gguf")
    with Gguf(tmp_path / "x.gguf") as gguf:
        read = gguf.read("a.")
    assert {key: read[key] for key in values if key in read} == {
        k: v for k, v in values.items() if k[0] == "a"
    }
    assert np.asarray(read["a.ints"]).dtype == np.uint64
    assert np.asarray(read["a.list"]).tolist() == [3, 4]


def test_importing_tiny_does_not_load_the_library() -> None:
    code = "import sys, llamahybrid.tiny, llamahybrid.cli.main; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Dll:
    """A library as Windows sees it: what it exports itself, nothing of what it depends on."""

    def __init__(self, name: str, library: ctypes.CDLL) -> None:
        self._name, self._library = name, library

    def __getattr__(self, function: str) -> object:
        if function.startswith(("ggml_", "gguf_")):
            raise AttributeError(f"function '{function}' not found")
        return getattr(self._library, function)


def test_ggmls_own_functions_are_found_where_only_their_library_has_them(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = tiny_model("qwen35").read_bytes()
    loaded = llama_cpp.llama_cpp._lib
    monkeypatch.setattr(llama_cpp.llama_cpp, "_lib", Dll(loaded._name, loaded))
    assert tiny.make("qwen35", tmp_path / "x.gguf").read_bytes() == same


def test_a_function_that_no_library_has_is_named() -> None:
    with pytest.raises(EngineError, match="no gguf_of_tomorrow"):
        _native("gguf_of_tomorrow", None)
