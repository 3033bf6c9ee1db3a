"""Options of a request as they apply to its model: samplers, stop tokens, thinking, template variables."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from llamahybrid.capi.samplers import Samplers
from llamahybrid.client.chat_template import require_template_kwargs, template_of, unread
from llamahybrid.client.chat_way import continuation_of
from llamahybrid.client.extras import Extras, current_extras
from llamahybrid.client.markers import markers_of
from llamahybrid.client.thought import Thinking
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import BUDGETS, AnswerRequest, Body, ChatCompletionRequest
from llamahybrid.server.errors import bad, require_tokens

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that chat templates do not know."""

_VARIABLES = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "documents")
"""Fields with variables of the chat template."""

_OPTIONS = tuple(name for name in AnswerRequest.model_fields if name in Samplers.__dataclass_fields__)


def extras_of(
    llm: Llama, body: Body, told: AnswerTokens | None = None, spelt: frozenset[int] = frozenset()
) -> Extras:
    """Return the extras of a request. Raises Refusal for unknown token ids, and for samplers without effect.

    `spelt`: control tokens that appear in the text of answers. `told` collects the tokens of the answers;
    None: the current `on_token` stays.
    """
    samplers = Samplers(
        **{name: getattr(body, name) for name in _OPTIONS if name != "dry_sequence_breakers"},
        dry_sequence_breakers=tuple(body.dry_sequence_breakers),
    )
    samplers.require_together(body.temperature, body.mirostat_mode)
    for name in ("stop_token_ids", "allowed_token_ids"):
        require_tokens(llm.n_vocab(), getattr(body, name), name)
    truncate = body.truncate_prompt_tokens
    if truncate == 0:
        raise bad("truncate_prompt_tokens leaves nothing of the prompt", "truncate_prompt_tokens")
    if truncate == -1:
        truncate = max(1, llm.n_ctx() - 1)
    return Extras(
        samplers=None if samplers == Samplers() else samplers,
        stop_token_ids=frozenset(body.stop_token_ids),
        truncate=truncate,
        thinking=thinking_of(llm, body),
        spelt=spelt,
        prompt_only=bool(getattr(body, "echo", False)) and body.max_tokens == 0,
        on_token=current_extras().on_token if told is None else told.add,
    )


def goes_on(llm: Llama, body: ChatCompletionRequest) -> bool:
    """Return True if the answer to a chat continues its last message.

    By default it does, as with llama-server, if that message is the assistant's, has text and calls no tool.
    Raises Refusal if the request asks for a continuation of nothing.
    """
    asked = body.continue_final_message
    if asked is None and body.add_generation_prompt is None:
        last: Any = body.messages[-1]
        text = last.get("content") or last.get("reasoning_content")
        over = last.get("tool_calls") or last.get("function_call")
        return last["role"] == "assistant" and bool(text) and not over and template_of(llm) is not None
    if not (asked or body.add_generation_prompt is False):
        return False
    try:
        continuation_of(llm, body.messages)
    except ValueError as error:
        raise bad(str(error), "continue_final_message" if asked else "add_generation_prompt") from None
    return True


def thinking_of(llm: Llama, body: AnswerRequest) -> Thinking | None:
    """Return the thinking options of a body; None without a budget.

    Raises Refusal for a budget if the chat template has no markers of thinking.
    """
    if body.budget is None:
        return None
    think = markers_of(llm).think
    if think is None:
        name = next(name for name in BUDGETS if getattr(body, name) is not None)
        raise bad("the chat template of this model shows no thinking that could be ended", name)
    return Thinking(think, body.budget, body.reasoning_budget_message)


def closes_thought(llm: Llama, name: str, value: Any) -> bool:
    """Return True for a variable that turns thinking off if the template has markers, but no switch."""
    off = {"enable_thinking": False, "reasoning_effort": "none"}
    asked = name in off and type(value) is type(off[name]) and value == off[name]
    return asked and len(unread(llm, (*off,))) == len(off) and markers_of(llm).think is not None


def budget_of(llm: Llama, body: ChatCompletionRequest) -> int | None:
    """Return the thinking budget of a chat; 0 if thinking is off and the template has no switch.

    Raises Refusal as `thinking_of`.
    """
    if any(
        closes_thought(llm, name, getattr(body, name)) for name in ("enable_thinking", "reasoning_effort")
    ):
        return 0
    return None if (thinking := thinking_of(llm, body)) is None else thinking.budget


def template_kwargs(llm: Llama, body: ChatCompletionRequest, ignore_unread: bool = False) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets.

    Raises Refusal for a variable that the template does not read; `ignore_unread` leaves it out instead.
    """
    given = dict(body.chat_template_kwargs or {})
    for name in _VARIABLES[1:]:
        value = getattr(body, name)
        if value is None or closes_thought(llm, name, value):
            continue
        if name == "reasoning_effort" and unread(llm, [name]):
            if given.get("enable_thinking") is not None:
                continue
            name, value = "enable_thinking", value != "none"
        if given.setdefault(name, value) != value:
            raise bad(f"{name} and chat_template_kwargs say different things", name)
    if body.budget is not None and template_of(llm) is not None and not unread(llm, ["thinking_budget"]):
        given.setdefault("thinking_budget", body.budget)  # Seed-OSS's says it to the model
    if ignore_unread:
        for name in unread(llm, list(given)):
            del given[name]
    try:
        require_template_kwargs(llm, given)
    except ValueError as error:
        named = next((name for name in _VARIABLES if getattr(body, name) is not None), None)
        raise bad(str(error), named) from None
    return given


def set_effort(llm: Llama, chat: Any, effort: str | None) -> None:
    """Set the effort of a chat, by the words of Anthropic and OpenAI, if its template can obey."""
    switch = len(unread(llm, ("reasoning_effort", "enable_thinking"))) < 2
    if effort and (switch or closes_thought(llm, "reasoning_effort", effort)):
        chat.reasoning_effort = _EFFORTS.get(effort, effort)


class AnswerTokens:
    """The token ids of a request's answers, put into the choices of its completion or its chunks."""

    def __init__(self) -> None:
        self._new: dict[int, list[int]] = {}

    def add(self, answer: int, token: int) -> None:
        """Add a token of the answer of that index."""
        self._new.setdefault(answer, []).append(token)

    def into(self, made: Any) -> Any:
        """Return the completion, or the stream of chunks, with `tokens` in each choice."""
        return self._filled(made) if isinstance(made, dict) else self._stream(made)

    def _filled(self, made: dict[str, Any]) -> dict[str, Any]:
        for choice in made["choices"]:
            choice["tokens"] = self._new.pop(choice["index"], [])
        return made

    def _stream(self, chunks: Iterator[Any]) -> Generator[Any, None, None]:
        assert isinstance(chunks, Generator), "streams are generators"
        with closing(chunks):
            for chunk in chunks:
                yield self._filled(chunk)
