"""`chat_template_kwargs` of `Llama.create_chat_completion`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from tests.lab.gguf_edits import with_template

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}
HELLO: Any = [{"role": "user", "content": "Which papers does a boat need?"}]
ASKED: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path) -> str:
    return str(with_template(tiny_model("qwen35"), tmp_path / "switch.gguf"))


@pytest.mark.parametrize("prompt_cache", [True, False])
def test_a_variable_reaches_the_template(model: str, prompt_cache: bool) -> None:
    with closing(Llama(model, prompt_cache=prompt_cache, **OPTIONS)) as llm:
        plain = llm.create_chat_completion(HELLO, **ASKED)
        on = llm.create_chat_completion(HELLO, chat_template_kwargs={"enable_thinking": True}, **ASKED)
        off = llm.create_chat_completion(HELLO, chat_template_kwargs={"enable_thinking": False}, **ASKED)
        closed = "<|im_start|>user\n" + HELLO[0]["content"] + "<|im_end|>\n<|im_start|>assistant\n<think>\n"
        right = llm.create_completion(
            llm.tokenize((closed + "\n</think>\n\n").encode(), add_bos=False, special=True), **ASKED
        )
        assert on["choices"] == plain["choices"]
        assert off["choices"][0]["message"]["content"] == right["choices"][0]["text"]
        assert off["usage"]["prompt_tokens"] == right["usage"]["prompt_tokens"]


def test_a_stream_and_several_answers_have_it(model: str) -> None:
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}, **ASKED}
    with closing(Llama(model, n_parallel=2, **OPTIONS)) as llm:
        text = llm.create_chat_completion(HELLO, **off)["choices"][0]["message"]["content"]
        chunks = llm.create_chat_completion(HELLO, stream=True, **off)
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == text
        several = llm.create_chat_completion(HELLO, n=2, **off)
        assert [each["message"]["content"] for each in several["choices"]] == [text, text]


@pytest.mark.parametrize("name", ["no_such", "messages", "bos_token", "temperature"])
def test_a_variable_that_would_have_no_effect_is_refused(model: str, name: str) -> None:
    with closing(Llama(model, **OPTIONS)) as llm, pytest.raises(ValueError, match=name):
        llm.create_chat_completion(HELLO, chat_template_kwargs={name: 1}, **ASKED)


def test_a_format_that_is_no_template_takes_none(model: str) -> None:
    with (
        closing(Llama(model, chat_format="chatml", **OPTIONS)) as llm,
        pytest.raises(ValueError, match="chatml"),
    ):
        llm.create_chat_completion(HELLO, chat_template_kwargs={"enable_thinking": False}, **ASKED)
