"""`chat_template_kwargs` of `Llama.create_chat_completion`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from jinja2.exceptions import SecurityError
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llamahybrid import Llama
from tests.lab.gguf_edits import SWITCHED_TEMPLATE, with_bos
from tests.request.asking import said

HELLO: Any = [{"role": "user", "content": "Which papers does a boat need?"}]
ASKED: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}


@pytest.mark.parametrize("prompt_cache", [True, False])
def test_a_variable_reaches_the_template(templated: Any, prompt_cache: bool) -> None:
    llm = templated(SWITCHED_TEMPLATE, prompt_cache=prompt_cache)
    plain = llm.create_chat_completion(HELLO, **ASKED)
    on = llm.create_chat_completion(HELLO, chat_template_kwargs={"enable_thinking": True}, **ASKED)
    off = llm.create_chat_completion(HELLO, chat_template_kwargs={"enable_thinking": False}, **ASKED)
    closed = "<|im_start|>user\n" + HELLO[0]["content"] + "<|im_end|>\n<|im_start|>assistant\n<think>\n"
    tokens = llm.tokenize((closed + "\n</think>\n\n").encode(), add_bos=False, special=True)
    right = llm.create_completion(tokens, **ASKED)
    assert on["choices"] == plain["choices"]
    assert off["choices"][0]["message"]["content"] == right["choices"][0]["text"]
    assert off["usage"]["prompt_tokens"] == right["usage"]["prompt_tokens"]


def test_variables_that_would_have_no_effect_are_refused(templated: Any) -> None:
    llm = templated(SWITCHED_TEMPLATE)
    for name in ("no_such", "messages", "bos_token", "temperature"):
        with pytest.raises(ValueError, match=name):
            llm.create_chat_completion(HELLO, chat_template_kwargs={name: 1}, **ASKED)
    llm = templated(SWITCHED_TEMPLATE, chat_format="chatml")
    with pytest.raises(ValueError, match="chatml"):
        llm.create_chat_completion(HELLO, chat_template_kwargs={"enable_thinking": False}, **ASKED)


def test_a_formatter_that_the_program_puts_in_place_formats(
    templated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shouting(Jinja2ChatFormatter):  # type: ignore[misc]
        def __call__(self, *, messages: Any, **kwargs: Any) -> Any:
            loud = [{**each, "content": each["content"].upper()} for each in messages]
            return super().__call__(messages=loud, **kwargs)

    loud = [{**HELLO[0], "content": HELLO[0]["content"].upper()}]
    wanted = said(templated(SWITCHED_TEMPLATE).create_chat_completion(loud, **ASKED))
    monkeypatch.setattr(llama_cpp.llama_chat_format, "Jinja2ChatFormatter", Shouting)
    assert said(templated(SWITCHED_TEMPLATE).create_chat_completion(HELLO, **ASKED)) == wanted


@pytest.mark.parametrize("of", ["the model", "the program"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_samples_a_chat_and_hands_over_no_token_one_by_one(
    templated: Any, stream: bool, of: str
) -> None:
    """Upstream gives each chat by a template a stopping criterion, which no answer needs."""
    llm, ran = templated(SWITCHED_TEMPLATE), list[Any]()
    if of == "the program":
        ends = [llm.token_eos()]
        formatter = Jinja2ChatFormatter(SWITCHED_TEMPLATE, "<|im_end|>", "", stop_token_ids=ends)
        llm._chat_handlers["mine"], llm.chat_format = formatter.to_chat_handler(), "mine"
    run = llm.requests.loop.run
    llm.requests.loop.run = lambda *args: ran.append(args) or run(*args)
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


@pytest.mark.parametrize("bos", [False, True])
def test_instructions_that_are_added_to_a_system_prompt_leave_it_known(
    tiny_model: Any, tmp_path: Path, bos: bool
) -> None:
    """Such prompts differ where the first message ended, at the token that closes it."""
    path = with_bos(tiny_model("qwen35"), tmp_path / "bos.gguf") if bos else tiny_model("qwen35")
    system = "You are a helpful machine that has tools. " * 8
    with closing(Llama(str(path), n_ctx=1024, n_threads=1, verbose=False)) as llm:
        asks = (
            "<|im_end|>\n<|im_start|>user\nWhich papers does a boat need?<|im_end|>\n<|im_start|>assistant\n"
        )
        for text in (system, system + "Answer in one word."):
            llm.create_completion(f"<|im_start|>system\n{text}{asks}", **ASKED)
        known = llm.tokenize(("<|im_start|>system\n" + system).encode(), add_bos=bos, special=True)
        assert llm.last_request.cached == llm.last_request.matched == len(known)
