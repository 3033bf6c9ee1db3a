"""Parameters of our methods as editors and programs read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from llamahybrid import Llama, PromptCache

# isort: split
import llama_cpp

from llamahybrid.signatures import as_of

OURS = {
    "__init__": {
        *("prompt_cache", "wait", "paging", "draft_planes", "n_parallel", "cache_salt", "explain"),
        *("rpc_servers", "stock_logprobs"),
    },
    "__call__": {"n", "cache_salt"},
    "create_completion": {"n", "cache_salt"},
    "create_chat_completion": {
        *("n", "cache_salt", "chat_template_kwargs", "thinking_budget", "thinking_budget_message"),
        "continue_final_message",
    },
    "generate": {"samplers"},
    "sample": set(),
}


def parameters(thing: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(thing).parameters)


@pytest.mark.parametrize("name", OURS)
def test_signatures_are_upstreams_and_our_keywords(name: str) -> None:
    theirs, ours = (parameters(getattr(cls, name)) for cls in (llama_cpp.Llama, Llama))
    assert theirs.items() <= ours.items()
    assert ours.keys() - theirs.keys() == OURS[name]
    assert [known for known in ours if known in theirs] == list(theirs)
    assert all(ours[added].kind is inspect.Parameter.KEYWORD_ONLY for added in OURS[name])


def test_the_class_has_the_signature_of_its_constructor() -> None:
    shown = parameters(Llama)
    assert {"model_path", "n_ctx", "draft_model", "n_parallel", "kwargs"} <= shown.keys()
    assert "self" not in shown


def test_arguments_filtered_by_signature_are_complete(open_model: Callable[..., Any]) -> None:
    wanted = {"n_ctx": 256, "prompt_cache": PromptCache(ram_bytes=1 << 20), "of_another_library": 1}
    llm = open_model(**{name: value for name, value in wanted.items() if name in parameters(Llama)})
    assert (llm.n_ctx(), llm.prompt_cache.ram_bytes) == (256, 1 << 20)
    asked = {"prompt": "a", "max_tokens": 1, "n": 2, "cache_salt": "x", "of_another_library": 1}
    answer = llm(**{name: value for name, value in asked.items() if name in parameters(llm)})
    assert len(answer["choices"]) == 2


def test_wrapping_methods_add_their_parameters() -> None:
    def upstream(self: object, a: int, b: int = 1, **more: Any) -> None: ...

    def inner(self: object, *args: Any, c: int = 2, **more: Any) -> None: ...

    def outer(*args: Any, d: int = 3, b: int = 4, **more: Any) -> None: ...

    outer.__wrapped__ = inner  # type: ignore[attr-defined]
    shown = str(inspect.signature(as_of(upstream)(outer)))
    assert (
        shown
        == "(self: 'object', a: 'int', *, b: 'int' = 4, d: 'int' = 3, c: 'int' = 2, **more: 'Any') -> 'None'"
    )
