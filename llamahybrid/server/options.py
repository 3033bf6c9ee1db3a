"""Options of requests beyond upstream's: samplers, stop tokens, prompt, form of the answer."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, FailFast, Field

from llamahybrid.capi.samplers import Samplers
from llamahybrid.client.chat_template import require_template_kwargs, template_of, unread
from llamahybrid.client.extras import Extras, current_extras
from llamahybrid.llama import Llama
from llamahybrid.server.errors import bad, require_tokens
from llamahybrid.server.thinking import closes_thought, thinking_of

MOST_TOKENS = 200_000
"""Most token ids in one field."""


_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that chat templates do not know."""


class First(FailFast):
    """Report only the first wrong item of a list. Unlike pydantic's own it has a hash, which unions need."""

    __hash__ = object.__hash__


def at_most(count: int) -> BeforeValidator:
    """Refuse a larger object before its values are validated; of lists, pydantic's `max_length` does."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > count:
            raise ValueError(f"there are more than {count:,} entries")
        return given

    return BeforeValidator(check)


def one_or_several(given: Any) -> Any:
    """Return a text as a list of it."""
    return [given] if isinstance(given, str) else given


Ids: TypeAlias = Annotated[list[int], First()]
Text: TypeAlias = Annotated[str, Field(max_length=1000)]


class SamplingOptions(BaseModel):
    """Options of completions and chats, as llama-server and vLLM name them."""

    typical_p: float = Field(default=1.0, ge=0, le=1, description="Locally typical sampling; 1: off.")
    repeat_last_n: int | None = Field(
        default=None, ge=-1, description="Tokens of the answer that penalties count; -1: all; None: 64."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="vLLM's penalty of all tokens of the prompt and the answer; 1: off."
    )
    dry_multiplier: float = Field(default=0.0, ge=0, description="Strength of the DRY sampler; 0: off.")
    dry_base: float = Field(default=1.75, ge=0)
    dry_allowed_length: int = Field(default=2, ge=0, le=1 << 30)
    dry_penalty_last_n: int = Field(default=-1, ge=-1, le=1 << 30)
    dry_sequence_breakers: list[Text] = Field(default=["\n", ":", '"', "*"], max_length=100)
    xtc_probability: float = Field(default=0.0, ge=0, le=1, description="Of the XTC sampler; 0: off.")
    xtc_threshold: float = Field(default=0.1, ge=0, le=1)
    top_n_sigma: float = Field(default=-1.0, description="Of the top-n-sigma sampler; 0 or less: off.")
    dynatemp_range: float = Field(default=0.0, ge=0, description="Of the dynamic temperature; 0: off.")
    dynatemp_exponent: float = 1.0
    ignore_eos: bool = Field(default=False, description="The answer does not end before max_tokens.")
    guided_regex: str | None = Field(
        default=None, description="A regular expression that the answer matches as a whole (vLLM)."
    )
    stop_token_ids: Ids = Field(default=[], max_length=MOST_TOKENS, description="Tokens that end an answer.")
    allowed_token_ids: Ids | None = Field(
        default=None, min_length=1, max_length=MOST_TOKENS, description="The only tokens of an answer."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="Only the last tokens of the prompt; -1: as many as fit."
    )
    return_tokens: bool = Field(default=False, description="Each choice has its token ids: tokens.")


class TemplateOptions(BaseModel):
    """Options of chats that the model's chat template reads."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description='Variables of the chat template: {"enable_thinking": false}.'
    )
    enable_thinking: bool | None = Field(default=None, description="The same, of chat_template_kwargs.")
    reasoning_effort: Text | None = Field(default=None, description="The same; none: no thinking.")
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=1000)


class ParsingOptions(BaseModel):
    """Options for the parsing of answers to chats."""

    parse_tool_calls: bool = Field(default=True, description="Calls become tool_calls instead of text.")
    reasoning_format: Literal["none", "auto", "deepseek"] = Field(
        default="none", description="none: thinking stays text; else: reasoning_content."
    )


_OPTIONS = tuple(name for name in SamplingOptions.model_fields if name in Samplers.__dataclass_fields__)


def extras_of(
    llm: Llama, body: Any, told: AnswerTokens | None = None, spelt: frozenset[int] = frozenset()
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


def template_kwargs(llm: Llama, body: TemplateOptions, ignore_unread: bool = False) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets.

    Raises Refusal for a variable that the template does not read; `ignore_unread` leaves it out instead.
    """
    given = dict(body.chat_template_kwargs or {})
    for name in ("enable_thinking", "reasoning_effort", "documents"):
        value = getattr(body, name)
        if value is None or closes_thought(llm, name, value):
            continue
        if name == "reasoning_effort" and unread(llm, [name]):
            if given.get("enable_thinking") is not None:
                continue
            name, value = "enable_thinking", value != "none"
        if given.setdefault(name, value) != value:
            raise bad(f"{name} and chat_template_kwargs say different things", name)
    budget = getattr(body, "budget", None)
    if budget is not None and template_of(llm) is not None and not unread(llm, ["thinking_budget"]):
        given.setdefault("thinking_budget", budget)  # Seed-OSS's says it to the model
    if ignore_unread:
        for name in unread(llm, list(given)):
            del given[name]
    try:
        require_template_kwargs(llm, given)
    except ValueError as error:
        named = next((name for name in TemplateOptions.model_fields if getattr(body, name) is not None), None)
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
