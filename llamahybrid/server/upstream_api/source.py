"""Source: upstream's example server out of the verified sdist, and what of it is used, looked at once."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from os.path import expanduser
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from llamahybrid.engine.sdist import PIN, read
from llamahybrid.errors import EngineError
from llamahybrid.server.bodies import CacheOptions, Texts, count_refused
from llamahybrid.server.errors import Refusal, bad
from llamahybrid.server.options import First
from llamahybrid.server.schemas import excess
from llamahybrid.upstream import Look, mentions, takes

logger = logging.getLogger("llamahybrid.server")

SCRIPT = "examples/server/server.py"
CONFIGS = "examples/server/configs"
MODULE = "llamahybrid_upstream_server"

OWN_CONFIGS = ("qwen3.5-0.8b", "qwen3.6-27b", "qwen3.6-35b-a3b", "gemma-4-12b-it-qat", "gpt-oss-120b")

MARKS = {
    "<function=": "qwen3.6-27b",
    "<|channel|>": "gpt-oss-120b",
    "<|tool_call>": "gemma-4-12b-it-qat",
}
"""What a chat template spells where answers are written as the model of that config writes them."""


def has(*names: str) -> Look:
    """A type with these fields, annotated or of pydantic."""

    def look(kind: Any) -> str:
        known = {**getattr(kind, "__annotations__", {}), **getattr(kind, "model_fields", {})}
        missing = [name for name in names if name not in known]
        return f"has no {', '.join(missing)}" if missing else ""

    return look


_GIVEN = ("tool_name", "functions", "tools", "generation_prompt")

TOUCHED: dict[str, Look] = {
    "CreateChatCompletionRequest": has(
        *("messages", "max_tokens", "stream", "n", "logprobs", "top_logprobs", "logit_bias", "model"),
        *("functions", "tools", "response_format"),
    ),
    "ChatCompletionRequestMessage": has("role", "content"),
    "ChatCompletionTool": has("function"),
    "ChatCompletionTool.to_template_tool": takes("self"),
    "ChatCompletionFunctionDefinition": has("name"),
    "ChatCompletionFunctionDefinition.to_template_function": takes("self"),
    "CreateResponseRequest": has(
        *("input", "max_output_tokens", "stream", "top_logprobs", "model", "tools", "text", "reasoning"),
        *("previous_response_id", "store"),
    ),
    "ResponsesToolDefinition": lambda _: "",
    "ResponsesReasoningOptions": has("effort"),
    "CreateCompletionRequest": has(
        *("max_tokens", "temperature", "top_p", "stop", "logprobs", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "seed", "n"),
    ),
    "PreparedCompletionParts": has(
        "payload", "generation_prompt", "prompt_plan", "grammar_text", "tool_name"
    ),
    "PromptPlan": has("text_tokens"),
    "ResponsesChatRequestParts": has("messages", "tools"),
    "Jinja2ChatFormatter.__init__": mentions("_template_text"),
    "OpenAICompletion.model_validate": lambda _: "",
    "Model._build_chat_formatter": takes("self"),
    "Model.build_chat_prompt": takes("self", "messages"),
    "Model.tokenize": takes("self", "text", named=("add_bos", "special")),
    "OpenAIFormatter.__init__": takes("self", "model"),
    "OpenAIFormatter.completion_request_from_chat_request": takes("self", "body"),
    "OpenAIFormatter.response_request_to_chat_parts": takes("self", "body"),
    "OpenAIFormatter.completion_request_from_response_chat_parts": takes("self", "body"),
    "OpenAIFormatter.convert_completion_response_to_chat": takes("self", "completion", named=_GIVEN),
    "OpenAIFormatter.convert_completion_chunk_to_chat_chunks": takes(
        "self", "chunk", "started_indices", named=(*_GIVEN, "parsed_states")
    ),
    "OpenAIFormatter.convert_completion_response_to_response": takes(
        "self", "completion", "body", named=("tool_name", "tools", "generation_prompt")
    ),
    "OpenAIFormatter.convert_chat_chunk_to_response_events": takes("self", "chunk", "state"),
    "OpenAIFormatter.start_response_stream": takes("self", "state"),
    "OpenAIFormatter.response_stream_terminal_events": takes("self", "state", "completion"),
    "OpenAIFormatter.ResponsesStream": takes("body", "response_id", "created_at", "model"),
}
"""Every name of it that is used, and what must be so."""


def require(module: ModuleType) -> None:
    """Raise EngineError unless all that is leaned on looks as it should."""
    found = []
    for path, look in TOUCHED.items():
        value: Any = module
        try:
            for part in path.split("."):
                value = getattr(value, part)
        except AttributeError:
            found.append(f"{path} is not there")
            continue
        if text := look(value):
            found.append(f"{path} {text}")
    if found:
        raise EngineError(
            f"upstream's example server is not as llamahybrid knows it: {'; '.join(found)}; "
            "its API needs another release of llamahybrid, --api llama_cpp works as ever"
        )


@cache
def files() -> dict[str, bytes]:
    """The server and its configs, by their names in the sdist. Raises EngineError where it cannot be had."""
    return read(SCRIPT, *(f"{CONFIGS}/{name}.json" for name in OWN_CONFIGS))


@cache
def upstream() -> ModuleType:
    """The example server as a module; seconds, once.

    Raises:
        EngineError: another release of llama-cpp-python is installed, a package that it imports is not, the
            sdist cannot be had, or what is in it is not what is expected.
    """
    installed = metadata.version("llama-cpp-python")
    if installed != PIN.version:
        raise EngineError(
            f"--api upstream is for llama-cpp-python {PIN.version} exactly, and {installed} is installed"
        )
    module = ModuleType(MODULE)
    module.__file__ = f"{PIN.archive}/{SCRIPT}"
    sys.modules[MODULE] = module  # dataclasses and pydantic look their names up there
    try:
        exec(compile(files()[SCRIPT], module.__file__, "exec"), module.__dict__)
        require(module)
    except BaseException as error:
        sys.modules.pop(MODULE, None)
        if isinstance(error, ImportError):
            needed = (error.name or "openai").partition(".")[0]
            raise EngineError(
                f"upstream's example server needs {needed}: pip install 'llamahybrid[upstream-api]'"
            ) from error
        raise
    return module


@dataclass(frozen=True)
class Dialect:
    """How a model is asked, and how its answers are read."""

    template: str | None
    """Chat template; None: the model's own."""
    schema: dict[str, Any] | None
    """`response_schema`; None: an answer is all content."""
    max_output_tokens: int | None = None
    """Where a request names no bound."""


def dialect(named: str | None, template: str) -> Dialect:
    """What a config file of upstream's says; `named`: its path, or one of `OWN_CONFIGS`.

    Without one the answers of a model with this chat template are read by the schema that goes with it.

    Raises:
        ValueError: there is no such config, or it is none.
        EngineError: the sdist cannot be had.
    """
    if named is None:
        known = next((name for mark, name in MARKS.items() if mark in template), None)
        if known is None:
            logger.warning("no schema is known for this model's answers: tool calls stay text (api_config)")
            return Dialect(None, None)
        logger.info("answers are read as those of %s", known)
        return Dialect(None, dialect(known, template).schema)
    if named in OWN_CONFIGS:
        text = files()[f"{CONFIGS}/{named}.json"]
    else:
        try:
            text = Path(expanduser(named)).read_bytes()
        except OSError as error:
            raise ValueError(
                f"api_config: {error}; it is a file, or one of {', '.join(OWN_CONFIGS)}"
            ) from error
    try:
        model = json.loads(text)["model"]
        lines, schema, most = (
            model.get(k) for k in ("chat_template", "response_schema", "max_output_tokens")
        )
        lines = "".join(lines) if isinstance(lines, list) else lines
        if not isinstance(lines, str | None) or not isinstance(schema, dict | None):
            raise TypeError("chat_template or response_schema is of another type")
        if not isinstance(most, int | None):
            raise TypeError("max_output_tokens is of another type")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"api_config: {named} is no config of upstream's example server: {error!r}"
        ) from error
    return Dialect(lines, schema, most)


# -- what requests say -----------------------------------------------------------------------------------

_EFFORTS = {"none": None, "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that OpenAI's clients name and upstream does not know."""


MOST_METADATA = 16
"""Pairs, as OpenAI's. They come back in the response, and nothing else is done with them."""


class _Rules(CacheOptions):
    model_config = ConfigDict(allow_inf_nan=False)


class _ChatRules(_Rules):
    logit_bias_type: ClassVar[str] = "input_ids"

    @model_validator(mode="before")
    @classmethod
    def _newer_names(cls, said: Any) -> Any:
        """What OpenAI calls otherwise by now."""
        if isinstance(said, dict) and said.get("max_tokens") is None and "max_completion_tokens" in said:
            said = {**said, "max_tokens": said["max_completion_tokens"]}
        return said

    def refused(self: Any, max_n: int, max_logprobs: int) -> Refusal | None:
        """See `Body.refused`."""
        if not self.messages:
            return bad("there are no messages", "messages")
        schema = self.response_format and self.response_format.model_dump(by_alias=True)
        return (
            _bounds_refused(self.max_tokens, "max_tokens", self.top_logprobs, max_logprobs)
            or _schema_refused(schema, "response_format")
            or count_refused(self.n, max_n)
        )


class _ResponseRules(_Rules):
    n: ClassVar[int] = 1

    @model_validator(mode="before")
    @classmethod
    def _few_pairs(cls, said: Any) -> Any:
        """Raise ValueError for more metadata than is looked at one by one."""
        pairs = said.get("metadata") if isinstance(said, dict) else None
        if isinstance(pairs, dict) and len(pairs) > MOST_METADATA:
            raise ValueError(f"metadata has more than {MOST_METADATA} pairs")
        return said

    @model_validator(mode="before")
    @classmethod
    def _known_efforts(cls, said: Any) -> Any:
        reasoning = said.get("reasoning") if isinstance(said, dict) else None
        if isinstance(reasoning, dict) and reasoning.get("effort") in _EFFORTS:
            said = {**said, "reasoning": {**reasoning, "effort": _EFFORTS[reasoning["effort"]]}}
        return said

    def refused(self: Any, max_n: int, max_logprobs: int) -> Refusal | None:
        """See `Body.refused`."""
        if self.previous_response_id is not None:
            return bad("responses are not stored; send all input items", "previous_response_id")
        schema = self.text and self.text.model_dump(by_alias=True)
        return _bounds_refused(
            self.max_output_tokens, "max_output_tokens", self.top_logprobs, max_logprobs
        ) or _schema_refused(schema, "text")


def _bounds_refused(most: int | None, name: str, logprobs: int | None, max_logprobs: int) -> Refusal | None:
    if most is not None and most < 1:
        return bad(f"{name} is at least 1", name)
    if (logprobs or 0) > max_logprobs:
        return bad(f"no more than {max_logprobs} logprobs for each token", "top_logprobs")
    return None


def _schema_refused(schema: Any, name: str) -> Refusal | None:
    why = excess(schema)
    return None if why is None else bad(why, name)


@cache
def bodies() -> tuple[type[BaseModel], type[BaseModel]]:
    """Upstream's types of a chat and of a response, with what requests may say of the cache.

    Raises EngineError as `upstream`.
    """
    up = upstream()

    def first(item: Any) -> Any:
        return Annotated[list[item], First()]

    chat = create_model(
        "UpstreamChatCompletionRequest",
        __base__=(_ChatRules, up.CreateChatCompletionRequest),
        messages=(first(up.ChatCompletionRequestMessage), Field(default=[])),
        stop=(str | Texts | None, None),
        tools=(first(up.ChatCompletionTool) | None, None),
        functions=(first(up.ChatCompletionFunctionDefinition) | None, None),
    )
    response = create_model(
        "UpstreamResponseRequest",
        __base__=(_ResponseRules, up.CreateResponseRequest),
        tools=(first(up.ResponsesToolDefinition) | None, None),
    )
    return chat, response
