"""Bodies of requests: upstream's types, and further fields of OpenAI, llama-server and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import llama_cpp
from llama_cpp import llama_types as chat
from llama_cpp.server import types as upstream
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from typing_extensions import Self

from llamahybrid.llama import Llama
from llamahybrid.server.answer_format import AnswerFormat
from llamahybrid.server.errors import bad
from llamahybrid.server.messages import normalized, require_few, without_nulls
from llamahybrid.server.request_fields import Effect, Route, effect
from llamahybrid.server.schemas import MOST_LETTERS, excess
from llamahybrid.server.translation import translated

MOST_TOKENS = 200_000
"""Most token ids in one field."""


class First(FailFast):
    """Report only the first wrong item of a list. Unlike pydantic's own it has a hash, which unions need.

    A megabyte of wrong items, each reported, took 15 s and 2 GB, and held up all other requests.
    """

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


Texts: TypeAlias = Annotated[list[str], First()]
Tokens: TypeAlias = Annotated[list[int], First()]
Prompts: TypeAlias = str | Tokens | Texts | Annotated[list[Tokens], First()]
Message: TypeAlias = Annotated[
    chat.ChatCompletionRequestSystemMessage
    | chat.ChatCompletionRequestUserMessage
    | chat.ChatCompletionRequestAssistantMessage
    | chat.ChatCompletionRequestToolMessage
    | chat.ChatCompletionRequestFunctionMessage,
    Field(discriminator="role"),
]
Messages: TypeAlias = Annotated[list[Message], First()]

MOST_TOOLS = 1000
"""OpenAI takes 128. The validation of 12 MB of tools blocked the event loop."""

MOST_BIASES = 200_000
MOST_PROMPTS = 1000
MOST_STOPS = 1000
"""Upstream searches each stop string after each token, in the thread of all answers."""
Text: TypeAlias = Annotated[str, Field(max_length=1000)]

Budget: TypeAlias = Annotated[int, Field(ge=-1, le=1 << 30)]

BUDGETS = (
    *("thinking_budget", "thinking_budget_tokens", "thinking_token_budget"),
    *("reasoning_budget", "reasoning_budget_tokens"),
)
"""Names of the same field."""

Tools: TypeAlias = Annotated[list[llama_cpp.ChatCompletionTool], First(), Field(max_length=MOST_TOOLS)]
Functions: TypeAlias = Annotated[
    list[llama_cpp.ChatCompletionFunction], First(), Field(max_length=MOST_TOOLS)
]
Stops: TypeAlias = Annotated[
    list[Text], First(), Field(max_length=MOST_STOPS), BeforeValidator(one_or_several)
]
Biases: TypeAlias = Annotated[dict[str, float], at_most(MOST_BIASES)]


class RequestBody(BaseModel):
    """The body of a request. Null fields are absent; `require_known` judges unknown ones."""

    model_config = ConfigDict(allow_inf_nan=False, extra="allow")
    route: ClassVar[Route]
    answer_format: ClassVar[type[AnswerFormat]] = AnswerFormat
    shared: ClassVar[frozenset[str]] = frozenset()
    """Declared fields that a completion or a chat has by the same names."""

    @model_validator(mode="before")
    @classmethod
    def _received(cls, said: Any) -> Any:
        return cls.received(without_nulls(said)) if isinstance(said, dict) else said

    @classmethod
    def received(cls, said: dict[str, Any]) -> dict[str, Any]:
        """Return an object as the fields of the type have it. Raises ValueError for an impossible one."""
        return said

    def passed(self) -> dict[str, Any]:
        """Return the fields that a completion or a chat obeys by the same names, for one of another API."""
        extra = self.model_extra or {}
        obeyed = {name: extra[name] for name in extra if effect(self.route, name) is Effect.OBEYED}
        obeyed |= {name: getattr(self, name) for name in self.shared & self.model_fields_set}
        return {"repeat_penalty": 1.0, **obeyed}  # other APIs have no such penalty; upstream's default is 1.1

    def completion(self) -> Any:
        """Return the completion or the chat that this request becomes. Raises ValueError, Refusal."""
        return self

    def prepare(self, llm: Llama, body: Any) -> None:
        """Adapt that to a model, in the request's thread. Raises Refusal."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = Field(default=False, description="Without effect: nothing is padded.")
    continuous_usage_stats: Literal[False] = Field(default=False, description="Not supported.")


class AnswerRequest(RequestBody):
    """Fields of completions and chats. Values without effect are refused."""

    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = Field(
        default=None,
        max_length=1024,
        description="Names a conversation (OpenAI): its last prompt goes from RAM after those without a key. "
        "What is known of a prompt is found without.",
    )
    cache_salt: str | None = Field(
        default=None,
        max_length=1024,
        description="Only requests with the same salt share anything in the cache (vLLM).",
    )
    id_slot: int | None = Field(
        default=None, description="-1: any slot (llama-server). Requests go where most of them is known."
    )
    cache_prompt: bool | None = Field(
        default=None, description="true: go on from what is known (llama-server). It cannot be turned off."
    )

    return_progress: bool = Field(
        default=False, description="The stream tells how far the prompt is: prompt_progress (llama-server)."
    )
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
    stop_token_ids: Tokens = Field(
        default=[], max_length=MOST_TOKENS, description="Tokens that end an answer."
    )
    allowed_token_ids: Tokens | None = Field(
        default=None, min_length=1, max_length=MOST_TOKENS, description="The only tokens of an answer."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="Only the last tokens of the prompt; -1: as many as fit."
    )
    return_tokens: bool = Field(default=False, description="Each choice has its token ids: tokens.")
    thinking_budget: Budget | None = Field(
        default=None, description="Tokens of a thought, which is ended then; 0: at once, -1: no bound."
    )
    thinking_budget_tokens: Budget | None = Field(default=None, description="The same (llama-server).")
    reasoning_budget: Budget | None = Field(default=None, description="The same.")
    reasoning_budget_tokens: Budget | None = Field(default=None, description="The same (llama-server).")
    thinking_token_budget: Budget | None = Field(default=None, description="The same (vLLM).")
    reasoning_budget_message: str = Field(
        default="",
        max_length=1000,
        description="Text that a thought ends with where it is ended (llama-server).",
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

    def _require_supported(self, stream: bool, n: int | None, max_n: int, grammar: str | None) -> None:
        """Raise Refusal for what this server does not do."""
        if self.id_slot not in (None, -1):
            raise bad("slots are chosen by what they hold; leave out id_slot, or say -1", "id_slot")
        if self.cache_prompt is False:
            raise bad(
                "the prompt cache cannot be turned off for one request; leave out cache_prompt",
                "cache_prompt",
            )
        if self.return_progress and not stream:
            raise bad("return_progress is for streams: say stream, too", "return_progress")
        if self.stream_options is not None and not stream:
            raise bad("stream_options are for streams: say stream, too", "stream_options")
        if len(grammar or "") > MOST_LETTERS:
            raise bad(f"a grammar has at most {MOST_LETTERS:,} letters", "grammar")
        if n is not None and not 1 <= n <= max_n:
            raise bad(f"n is the number of answers: 1 to {max_n}", "n")


class CompletionRequest(
    upstream.CreateCompletionRequest,  # type: ignore[misc]
    AnswerRequest,
):
    """Continue a text, or several."""

    route: ClassVar = Route.COMPLETIONS

    prompt: Prompts = Field(default="", description="The prompt, or several, as text or as token ids.")
    stop: Stops | None = upstream.stop_field
    logit_bias: Biases | None = None
    response_format: llama_cpp.ChatCompletionRequestResponseFormat | None = None
    add_special_tokens: bool = Field(default=True, description="A prompt of text begins with a BOS.")

    @classmethod
    def received(cls, said: dict[str, Any]) -> dict[str, Any]:
        """See `RequestBody.received`."""
        return translated(said, chat=False)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, at least one, each as text or as token ids."""
        return [each or "" for each in several(self.prompt)]

    def of_prompt(self, at: int) -> CompletionRequest:
        """Return a copy of the request with a single prompt, by its index."""
        return self.model_copy(update={"prompt": self.prompts()[at]})

    def require_supported(self, max_n: int, max_logprobs: int) -> None:
        """Raise Refusal for a request that cannot be answered."""
        self._require_supported(self.stream, self.n, max_n, self.grammar)
        if (self.logprobs or 0) > max_logprobs:
            raise bad(f"no more than {max_logprobs} logprobs for each token", "logprobs")
        if len(self.prompts()) > MOST_PROMPTS:
            raise bad(f"no more than {MOST_PROMPTS} prompts in one request", "prompt")
        if len(self.prompts()) > 1 and self.return_progress:
            raise bad("return_progress is for one prompt", "return_progress")
        if self.best_of not in (None, 1, self.n):
            raise bad("best_of is not supported; ask for n answers", "best_of")
        if self.echo and self.stream:
            raise bad("echo comes with a whole answer, not with a stream", "echo")
        form: Any = self.response_format or {}
        if (why := excess(form)) is not None:
            raise bad(why, "response_format")
        if self.grammar is not None and form.get("type") == "json_object":
            raise bad("an answer follows a grammar or a response_format, not both", "grammar")


def several(given: Any) -> list[Any]:
    """Return prompts, or texts to embed, as a list: each is a text, or a list of token ids."""
    return given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]


class ChatCompletionRequest(
    upstream.CreateChatCompletionRequest,  # type: ignore[misc]
    AnswerRequest,
):
    """Answer messages."""

    route: ClassVar = Route.CHAT

    messages: Messages = Field(default=[], description="The messages to answer.")
    stop: Stops | None = upstream.stop_field
    logit_bias: Biases | None = None
    tools: Tools | None = Field(default=None, description="Tools that the answer may call.")
    functions: Functions | None = Field(default=None, description="The same, as they were named before.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description='Variables of the chat template: {"enable_thinking": false}.'
    )
    enable_thinking: bool | None = Field(default=None, description="The same, of chat_template_kwargs.")
    reasoning_effort: Text | None = Field(default=None, description="The same; none: no thinking.")
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=1000)
    continue_final_message: bool | None = Field(
        default=None, description="null: where there is one, as llama-server; false: a new answer, as vLLM."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="The opposite of continue_final_message, which vLLM asks for, too."
    )
    parse_tool_calls: bool = Field(default=True, description="Calls become tool_calls instead of text.")
    reasoning_format: Literal["none", "auto", "deepseek"] = Field(
        default="none", description="none: thinking stays text; else: reasoning_content."
    )

    @classmethod
    def received(cls, said: dict[str, Any]) -> dict[str, Any]:
        """See `RequestBody.received`."""
        require_few(said.get("messages"))
        said = translated(said, chat=True)
        said["messages"] = normalized(said.get("messages") or [])
        for name, newer in (("tools", _tool), ("functions", _function)):
            if isinstance(said.get(name), list) and len(said[name]) <= MOST_TOOLS:
                said[name] = [newer(each) if isinstance(each, dict) else each for each in said[name]]
        return said

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

    def require_supported(self, max_n: int, max_logprobs: int) -> None:
        """Raise Refusal for a request that cannot be answered."""
        self._require_supported(self.stream, self.n, max_n, self.grammar)
        if not self.messages:
            raise bad("there are no messages", "messages")
        if (self.top_logprobs or 0) > max_logprobs:
            raise bad(f"no more than {max_logprobs} logprobs for each token", "top_logprobs")
        for name in ("response_format", "tools", "functions"):
            if (why := excess(getattr(self, name))) is not None:
                raise bad(why, name)
        self._require_one_form()

    def _require_one_form(self) -> None:
        """Raise Refusal for two forms of one answer, of which upstream ignores one.

        llama-server: "Cannot use both json_schema and grammar", "Cannot use custom grammar constraints with
        tools" (server-common.cpp).
        """
        form: Any = self.response_format
        if self.grammar is None and self.guided_regex is None:
            return
        name = "guided_regex" if self.grammar is None else "grammar"
        if form is not None and form.get("type") == "json_object":
            raise bad(f"an answer follows {name} or response_format, not both", name)
        if self.tool_choice == "required" or isinstance(self.tool_choice or self.function_call, dict):
            raise bad(f"the call of a tool that was chosen follows its schema, and no {name}", name)


Body: TypeAlias = CompletionRequest | ChatCompletionRequest
"""The requests that wait for a slot; those of other APIs become one of them."""


def _tool(said: dict[str, Any]) -> dict[str, Any]:
    function = said.get("function")
    return {**said, "function": _function(function)} if isinstance(function, dict) else said


def _function(said: dict[str, Any]) -> dict[str, Any]:
    """Return a function with the parameters that upstream requires."""
    found = without_nulls(said)
    found.setdefault("parameters", {"type": "object", "properties": {}})
    return found
