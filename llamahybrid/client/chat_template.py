"""Chat templates: the prompts they make, variables that a request sets, and templates that fill lists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
import llama_cpp
from jinja2 import meta
from llama_cpp import llama_chat_format

from llamahybrid.client.extras import StandIn
from llamahybrid.errors import LlamaHybridError

_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion).parameters
_DEFAULTS = {name: each.default for name, each in _CHAT.items() if each.default is not each.empty}
_OURS = ("eos_token", "bos_token", "raise_exception", "add_generation_prompt", "strftime_now")
"""Set by llama-cpp-python (llama_chat_format.py, Jinja2ChatFormatter)."""

_CRITERION = "Jinja2ChatFormatter.__call__.<locals>.stop_on_last_token"

_FILLS_LISTS = re.compile(r"\.(append|pop)\(")


class TemplateFormatter(llama_chat_format.Jinja2ChatFormatter):  # type: ignore[misc]
    """Upstream's formatter, also for templates that fill lists of their own, as llama.cpp's for Kimi K2 do.

    The sandbox of upstream and of transformers refuses changes of any list, since it cannot tell a template's
    from the caller's. Here such a template has copies of all that it is given. `append` and `pop` reach no
    more of Python than `+` on lists, which the sandbox allows.
    """

    def __init__(self, template: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(template, *args, **kwargs)
        environment = self._environment.environment  # the sandbox of this template alone
        safe = environment.is_safe_attribute
        self._fills_lists = bool(_FILLS_LISTS.search(template))

        def fills_list(obj: Any, name: str, value: Any) -> bool:
            return (type(obj) is list and name in ("append", "pop")) or bool(safe(obj, name, value))

        if self._fills_lists:
            environment.is_safe_attribute = fills_list

    def __call__(self, **given: Any) -> Any:
        """See `llama_cpp.llama_chat_format.Jinja2ChatFormatter`."""
        return super().__call__(**(deepcopy(given) if self._fills_lists else given))


def is_idle(llm: Any, criteria: Any, prompt: Sequence[int]) -> bool:
    """The criteria are upstream's for chat templates, whoever made the formatter, and cannot end this answer.

    Upstream's criterion compares the last decoded token with end tokens (llama_chat_format.py,
    Jinja2ChatFormatter.__call__). Answers end on such a token before it is decoded; a prompt may end with it.
    """
    if not isinstance(criteria, llama_cpp.StoppingCriteriaList) or len(criteria) != 1:
        return False
    if getattr(criteria[0], "__qualname__", None) != _CRITERION:
        return False
    ends = inspect.getclosurevars(criteria[0]).nonlocals["self"].stop_token_ids
    if not ends.isdisjoint(prompt[-1:]):
        return False
    return all(token == -1 or llama_cpp.llama_vocab_is_eog(llm._model.vocab, token) for token in ends)


def use_own_formatter(llm: Any) -> None:
    """Take `TemplateFormatter` for a new model's templates, unless the program put a class in its place."""
    if llama_chat_format.Jinja2ChatFormatter not in TemplateFormatter.__mro__:
        return
    ends = llm.token_eos(), llm.token_bos()
    spelt = [llm._model.token_get_text(token) if token != -1 else "" for token in ends]
    for name in llm._chat_handlers:
        if template := llm.metadata.get("tokenizer." + name.removesuffix(".default")):
            formatter = TemplateFormatter(template, *spelt, stop_token_ids=[llm.token_eos()])
            llm._chat_handlers[name] = formatter.to_chat_handler()


def template_of(llm: Any) -> str | None:
    """The Jinja template that formats the chats of a model; None: something else does."""
    kind, _, name = (llm.chat_format or "").partition(".")
    if llm.chat_handler is not None or kind != "chat_template":
        return None
    key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
    text: str | None = llm.metadata.get(key)
    return text


@lru_cache(maxsize=64)
def variables(template: str) -> frozenset[str] | None:
    """The names that a template reads from outside; None where they cannot be told."""
    extensions = [
        llama_chat_format.Jinja2ChatFormatter.IgnoreGenerationTags,
        "jinja2.ext.loopcontrols",
    ]
    try:
        return frozenset(
            meta.find_undeclared_variables(jinja2.Environment(extensions=extensions).parse(template))
        )
    except jinja2.TemplateError:
        return None


def unread(llm: Any, names: Collection[str]) -> list[str]:
    """Return the names that the chat template of a model does not read."""
    template = template_of(llm)
    read = frozenset[str]() if template is None else variables(template)
    return [] if read is None else [name for name in names if name not in read]


def require_template_kwargs(llm: Any, given: Mapping[str, Any]) -> None:
    """Raise ValueError for variables that would have no effect, or are not a request's to set."""
    if (taken := [name for name in given if name in _OURS or name in _CHAT]) != []:
        raise ValueError(f"chat_template_kwargs cannot set {taken[0]!r}")
    if given and template_of(llm) is None:
        raise ValueError(f"chat_template_kwargs: the chat format {llm.chat_format!r} is no template")
    if (idle := unread(llm, given)) != []:
        raise ValueError(f"chat_template_kwargs: the chat template does not read {idle[0]!r}")


def chat_with(llm: Any, given: Mapping[str, Any], **options: Any) -> Any:
    """`llama_cpp.Llama.create_chat_completion`, with these variables in the template.

    Without variables, the method that upstream's class has now: a monitor may have wrapped it.
    Raises ValueError as `require_template_kwargs`.
    """
    require_template_kwargs(llm, given)
    if given:
        return _formatted(llm, given, options)
    method = inspect.getattr_static(llama_cpp.Llama, "create_chat_completion")
    bound = method.__get__(llm, type(llm)) if hasattr(method, "__get__") else method
    return bound(**options)


def _formatted(llm: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    return handler_of(llm)(llama=llm, **{**_DEFAULTS, **options}, **given)


def handler_of(llm: Any) -> Callable[..., Any]:
    """Return the handler of a model's chats, as upstream chooses it."""
    handler: Callable[..., Any] | None = llm.chat_handler or llm._chat_handlers.get(llm.chat_format)
    return handler or llama_chat_format.get_chat_completion_handler(llm.chat_format)


# -- prompts that are not decoded ------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """The input of a model."""

    text: str
    tokens: list[int]


class _Made(Exception):
    """The prompt of a chat format is complete."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt


class _Prompting(StandIn):
    """Stops a chat format where it completes its prompt."""

    _text = ""

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        self._text = text.decode("utf-8", "replace")
        tokens: list[int] = self._llm.tokenize(text, *args, **kwargs)
        return tokens

    def create_completion(self, prompt: str | list[int], **_: Any) -> Any:
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt.encode("utf-8"), special=True)
        raise _Made(Prompt(self._text, prompt))


def chat_prompt(llm: Any, template: Mapping[str, Any], **options: Any) -> Prompt:
    """Return the prompt of `create_chat_completion(**options)`; `template`: variables of the chat template.

    `llm` may be a `StandIn`. Raises LlamaHybridError for a chat format that makes no prompt, and errors of
    formats at messages.
    """
    require_template_kwargs(llm, template)
    try:
        _formatted(_Prompting(llm), template, options)
    except _Made as made:
        return made.prompt
    raise LlamaHybridError(f"the chat format {llm.chat_format!r} makes no prompt")
