"""Vocabularies: text survives them, and the template speaks ChatML as Qwen3 does."""

from __future__ import annotations

import llama_cpp
import pytest

from tests.tiny.loading import CHAT, TinyModel, load


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
