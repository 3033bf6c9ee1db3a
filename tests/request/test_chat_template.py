"""`chat_template_kwargs` of `Llama.create_chat_completion`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from jinja2.exceptions import SecurityError

from llamahybrid import Llama
from tests.lab.gguf_edits import with_template
from tests.request.asking import said

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


@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_samples_a_chat_and_hands_over_no_token_one_by_one(model: str, stream: bool) -> None:
    """Upstream gives each chat by a template a stopping criterion, which no answer needs."""
    with closing(Llama(model, **OPTIONS)) as llm:
        loop, ran = llm.requests.loop, list[Any]()
        assert loop is not None
        run = loop.run
        loop.run = lambda *args: ran.append(args) or run(*args)  # type: ignore[method-assign, func-returns-value]
        made = llm.create_chat_completion(HELLO, stream=stream, max_tokens=20, temperature=0.0)
        assert len(said(made)) > 10
        assert len(ran) < 5


def test_a_prompt_that_ends_with_the_end_token_has_no_answer(templated: Any) -> None:
    """As upstream's: its criterion looks at the last token of the prompt, too."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    models = templated(template), templated(template, llama_cpp.Llama)
    answers = [each.create_chat_completion(HELLO, **ASKED)["choices"][0] for each in models]
    assert answers[0] == answers[1]
    assert answers[0]["message"]["content"] == ""


FILLING = (
    "{% set said = namespace(roles=[]) %}{% set first = messages.pop(0) %}"
    "{% for m in [first] + messages %}{% set _ = said.roles.append(m.role) %}{{ m.content }}{% endfor %}"
    "{{ said.roles.pop() }}, {{ said.roles | length }}"
)
"""A template that changes lists: one of its own, and the caller's."""


def test_a_template_may_fill_lists_of_its_own(templated: Any) -> None:
    messages = [{"role": role, "content": f"{role}. "} for role in ("system", "user")]
    before, llm = [*messages], templated(FILLING)
    made = llm.create_chat_completion(messages, **ASKED)
    right = llm.create_completion("system. user. user, 1", **ASKED)
    assert messages == before
    assert made["choices"][0]["message"]["content"] == right["choices"][0]["text"]


@pytest.mark.parametrize("change", ["messages.clear()", "messages[0].update(role='x')", "[].__class__"])
def test_other_changes_stay_refused(templated: Any, change: str) -> None:
    llm = templated("{% set own = [] %}{% set _ = own.append(1) %}{% set _ = " + change + " %}{{ _.mro }}")
    with pytest.raises(SecurityError):
        llm.create_chat_completion(HELLO, **ASKED)
