"""Options of a request beyond upstream's: samplers, stop tokens, the prompt, and what is returned."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, FailFast, Field, model_validator
from typing_extensions import Self

from llamahybrid.capi.samplers import Samplers
from llamahybrid.client.chat_template import require_template_kwargs, template_of, unread
from llamahybrid.client.extras import Extras, current_extras
from llamahybrid.client.markers import markers_of
from llamahybrid.client.thought import Thinking
from llamahybrid.llama import Llama
from llamahybrid.server.errors import bad

MOST_TOKENS = 200_000
"""Token ids that one field may list."""


class First(FailFast):
    """Of a list, the first item that is wrong is told of. pydantic's own has no hash, as unions need one."""

    __hash__ = object.__hash__


Ids: TypeAlias = Annotated[list[int], First()]
Text: TypeAlias = Annotated[str, Field(max_length=1000)]
Budget: TypeAlias = Annotated[int, Field(ge=-1, le=1 << 30)]

BUDGETS = (
    *("thinking_budget", "thinking_budget_tokens", "thinking_token_budget"),
    *("reasoning_budget", "reasoning_budget_tokens"),
)
"""Names of one field."""


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


class ThinkingOptions(BaseModel):
    """How long an answer thinks, by the names that llama-server, vLLM and others have for it."""

    thinking_budget: Budget | None = Field(
        default=None, description="Tokens of a thought, which is ended then; 0: at once, -1: no bound."
    )
    thinking_budget_tokens: Budget | None = Field(default=None, description="The same (llama-server).")
    reasoning_budget: Budget | None = Field(default=None, description="The same.")
    reasoning_budget_tokens: Budget | None = Field(default=None, description="The same (llama-server).")
    thinking_token_budget: Budget | None = Field(default=None, description="The same (vLLM).")
    reasoning_budget_message: Text = Field(
        default="", description="Text that a thought ends with where it is ended (llama-server)."
    )

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name) is not None}
        if len(set(given.values())) > 1:
            raise ValueError(f"{' and '.join(given)} are the same field; give one")
        return self

    @property
    def budget(self) -> int | None:
        """Tokens of a thought; None: no bound."""
        found = next((each for name in BUDGETS if (each := getattr(self, name)) is not None), None)
        return None if found == -1 else found


class ContinuationOptions(BaseModel):
    """Whether an answer goes on from the assistant's message that comes last."""

    continue_final_message: bool | None = Field(
        default=None, description="null: where there is one, as llama-server; false: a new answer, as vLLM."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="The opposite of continue_final_message, which vLLM asks for, too."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        goes_on, new = self.continue_final_message, self.add_generation_prompt
        if goes_on and new:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        if new is False and goes_on is False:
            raise ValueError(
                "add_generation_prompt: an answer is a new one, or goes on from the last message"
            )
        return self


class ReadingOptions(BaseModel):
    """How the text of an answer to a chat is read."""

    parse_tool_calls: bool = Field(default=True, description="Calls are told as tool_calls, not as text.")
    reasoning_format: Literal["none", "auto", "deepseek"] = Field(
        default="none", description="none: thinking is told as text; else as reasoning_content."
    )


_OPTIONS = tuple(name for name in SamplingOptions.model_fields if name in Samplers.__dataclass_fields__)


def thinking_of(llm: Llama, body: Any) -> Thinking | None:
    """How the answers to a prompt think. Raises Refusal for a budget where no thinking is known."""
    if body.budget is None:
        return None
    think = markers_of(llm).think
    if think is None:
        name = next(name for name in BUDGETS if getattr(body, name) is not None)
        raise bad("the chat template of this model shows no thinking that could be ended", name)
    return Thinking(think, body.budget, body.reasoning_budget_message)


def closes_thought(llm: Llama, name: str, value: Any) -> bool:
    """A variable asks for no thinking, and the template, which has no switch, shows how a thought ends."""
    off = {"enable_thinking": False, "reasoning_effort": "none"}
    asked = name in off and type(value) is type(off[name]) and value == off[name]
    return asked and len(unread(llm, (*off,))) == len(off) and markers_of(llm).think is not None


def budget_of(llm: Llama, body: Any) -> int | None:
    """Tokens of a thought of a chat: its budget, and 0 where thinking is off without a switch.

    Raises Refusal as `thinking_of`.
    """
    if any(
        closes_thought(llm, name, getattr(body, name)) for name in ("enable_thinking", "reasoning_effort")
    ):
        return 0
    return None if (thinking := thinking_of(llm, body)) is None else thinking.budget


def extras_of(
    llm: Llama, body: Any, told: AnswerTokens | None = None, spelt: frozenset[int] = frozenset()
) -> Extras:
    """The extras of a request. Raises Refusal for token ids there are not, and samplers without effect.

    `spelt`: control tokens that its answers are read by.

    `told` collects the tokens of its answers; without it, whoever listens around the request does.
    """
    samplers = Samplers(
        **{name: getattr(body, name) for name in _OPTIONS if name != "dry_sequence_breakers"},
        dry_sequence_breakers=tuple(body.dry_sequence_breakers),
    )
    samplers.require_together(body.temperature, body.mirostat_mode)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if any(not 0 <= token < llm.n_vocab() for token in getattr(body, name) or ()):
            raise bad(f"token ids lie in [0, {llm.n_vocab()})", name)
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
    """The variables of the chat template that a request sets.

    Raises Refusal for one that the template does not read; with `ignore_unread` it is left out.
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


class AnswerTokens:
    """The token ids of a request's answers, put into the choices of its completion or its chunks."""

    def __init__(self) -> None:
        self._new: dict[int, list[int]] = {}

    def add(self, answer: int, token: int) -> None:
        """A token of the answer of that index."""
        self._new.setdefault(answer, []).append(token)

    def into(self, made: Any) -> Any:
        """The completion, or the stream of chunks, with `tokens` in each choice."""
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
