"""Requests of `/v1/messages` and of its token counts, and the chats that they become.

Fields as in the `anthropic` package (message_create_params.py). Blocks and tools of other types, as those
that Anthropic's servers run, get 400. Other fields of a block are ignored: `signature`, `is_error`, and
`cache_control`, as the start of each message has a checkpoint anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from typing_extensions import Self

from llamahybrid.client.chat_template import unread
from llamahybrid.client.markers import markers_of
from llamahybrid.llama import Llama
from llamahybrid.server.anthropic.message import MessageFormat
from llamahybrid.server.bodies import MOST_STOPS, MOST_TOOLS, ChatCompletionRequest, First, RequestBody, Text
from llamahybrid.server.errors import bad
from llamahybrid.server.messages import MOST_PARTS, normalized, require_few, without_nulls
from llamahybrid.server.options import set_effort
from llamahybrid.server.request_fields import Route

_BILLING = re.compile(r"x-anthropic-billing-header:(\s*\w+=[^;\n]*;)+\s*")
"""Claude Code's first words, for Anthropic's servers. `cch` changes with each request, and no cached prompt
would match behind it (llama.cpp, tools/server/server-chat.cpp, and its PR 21793)."""

_BLOCKS: dict[str, tuple[str, ...]] = {
    **{"text": ("text",), "image": ("source",), "thinking": ("thinking",), "redacted_thinking": ()},
    **{"tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id", "content")},
}
"""The fields of a block of each type. Redacted thinking, of another server, is left out."""

_SOURCES = {"base64": ("media_type", "data"), "url": ("url",)}
"""The fields of an image's source of each type."""

_OPTIONAL = ("content",)

_OF = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "image"),
}
"""The types of blocks in messages of each role, and in results of calls."""


def _of_type(said: Any, fields: Mapping[str, tuple[str, ...]]) -> Any:
    """Return an object with the fields of its type alone; one of no known type as it is."""
    kind = said.get("type") if isinstance(said, dict) else None
    if not isinstance(kind, str) or kind not in fields:
        return said
    return {name: said[name] for name in ("type", *fields[kind]) if name in said}


class Source(BaseModel):
    """An image, in the request or elsewhere; 400 unless the model reads images, as in chat completions."""

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, said: Any) -> Any:
        return _of_type(said, _SOURCES)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not (self.url if self.type == "url" else self.media_type and self.data):
            raise ValueError(f"the {self.type} of this image is missing")
        return self


def _blocks(content: Any) -> Any:
    """Return content as blocks: a text is one block of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _require_types(place: str, blocks: Sequence[Part]) -> None:
    for block in blocks:
        if block.type not in _OF[place]:
            raise ValueError(f"a block of type {block.type!r} is no part of {place} content")


class Part(BaseModel):
    """A block within the result of a call."""

    type: str
    text: str = ""
    source: Source | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, said: Any) -> Any:
        kind = said.get("type") if isinstance(said, dict) else None
        if not isinstance(kind, str):
            return said
        if kind not in _BLOCKS:
            raise ValueError(f"a block of type {kind!r} is not supported")
        needed = [name for name in _BLOCKS[kind] if name not in _OPTIONAL]
        if missing := [name for name in needed if said.get(name) is None]:
            raise ValueError(f"{missing[0]} is missing in a block of type {kind!r}")
        return _of_type(said, _BLOCKS)


class Block(Part):
    """A content block of any type."""

    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: Annotated[list[Part], First(), Field(max_length=MOST_PARTS), BeforeValidator(_blocks)] = []

    @model_validator(mode="after")
    def _results(self) -> Self:
        _require_types("tool_result", self.content)
        return self


Blocks: TypeAlias = Annotated[list[Block], First(), Field(max_length=MOST_PARTS), BeforeValidator(_blocks)]


class Message(BaseModel):
    """A turn of the user, with results of calls, one of the model, or an instruction between turns."""

    role: str
    content: Blocks

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.role not in ("user", "assistant", "system"):
            raise ValueError(f"there is no role {self.role!r}")
        _require_types(self.role, self.content)
        return self


class Tool(BaseModel):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, said: Any) -> Any:
        kind = said.get("type") if isinstance(said, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(f"a tool of type {kind!r} is not supported; only custom tools are")
        return said


class ToolChoice(BaseModel):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.type == "auto" and self.disable_parallel_tool_use:
            raise ValueError("disable_parallel_tool_use goes with any or tool, not with auto")
        if self.type == "tool" and self.name is None:
            raise ValueError("name is missing")
        return self


class Thinking(BaseModel):
    """Thinking on or off, and its budget, if the chat template has markers of thinking."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=0, le=1 << 30)


class JsonFormat(BaseModel):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Effort, and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Edit(BaseModel):
    """Removal of old thinking, which the chat template decides; no other edit is supported."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(BaseModel):
    """Edits of the context by the server."""

    edits: list[Edit] = Field(default=[], max_length=100)


class CountTokensRequest(RequestBody):
    """`/v1/messages/count_tokens`."""

    route: ClassVar = Route.COUNT_TOKENS
    shared: ClassVar = frozenset({"chat_template_kwargs"})

    model: str
    messages: Annotated[list[Message], First()] = Field(min_length=1)
    system: Blocks = Field(default=[])
    tools: Annotated[list[Tool], First()] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(default=None, description="`output_config.format`.")
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template (llama-server)."
    )

    @classmethod
    def received(cls, said: dict[str, Any]) -> dict[str, Any]:
        """See `RequestBody.received`."""
        if "thread" in said:  # with this code the client sends all messages again
            message = "this server holds no conversations: send all messages, and no thread"
            raise bad(message, "thread", "thread_unsupported_request")
        require_few(said.get("messages"))
        require_few(_parts(said.get("messages")))  # results of calls have parts, too
        return said

    @model_validator(mode="after")
    def _instructions(self) -> Self:
        _require_types("system", self.system)
        return self

    def completion(self) -> ChatCompletionRequest:
        """See `RequestBody.completion`."""
        said = {**self.passed(), "model": self.model}
        turns = [chat for message in self.messages for chat in _chat_messages(message)]
        said["messages"] = normalized([*_system(self.system), *turns])
        if self.messages[-1].role == "assistant":
            said["continue_final_message"] = True
        if self.tools:
            said["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            said["tool_choice"] = _choice(self.tool_choice)
        form = self.output_format or (self.output_config and self.output_config.format)
        if form:
            schema = {"name": "answer", "schema": form.schema_}
            said["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatCompletionRequest.model_validate(said)

    def prepare(self, llm: Llama, body: ChatCompletionRequest) -> None:
        """Separate thinking from content in the answer, and switch it if the template can."""
        kind = self.thinking and self.thinking.type
        output = self.output_config or OutputConfig()
        body.reasoning_format = "auto"
        idle = unread(llm, ("reasoning_effort", "enable_thinking"))
        given = body.chat_template_kwargs or {}
        if not given.keys() & {"reasoning_effort", "enable_thinking"}:
            set_effort(llm, body, "none" if kind == "disabled" else output.effort)
        if kind == "enabled" and self.thinking is not None and markers_of(llm).think is not None:
            body.thinking_budget = self.thinking.budget_tokens
        if kind in ("enabled", "adaptive") and "enable_thinking" not in (*idle, *given):
            body.enable_thinking = True


class MessagesRequest(CountTokensRequest):
    """Answer messages, as Anthropic's API does."""

    route: ClassVar = Route.MESSAGES
    answer_format: ClassVar = MessageFormat
    shared: ClassVar = CountTokensRequest.shared | {
        *("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "grammar", "cache_salt")
    }

    stream: bool = False
    max_tokens: int = Field(ge=0, description="0: the prompt is decoded and kept, nothing is said.")
    stop_sequences: Annotated[list[Text], First()] = Field(default=[], max_length=MOST_STOPS)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, ge=0)
    seed: int | None = None
    grammar: str | None = Field(default=None, description="In GBNF; the answer follows it (llama-server).")
    cache_salt: str | None = Field(
        default=None, max_length=1024, description="Only requests with the same salt share what is cached."
    )

    @property
    def stops(self) -> list[str]:
        """The stop sequences that are not empty."""
        return [stop for stop in self.stop_sequences if stop]

    def passed(self) -> dict[str, Any]:
        """See `RequestBody.passed`."""
        bounds = {"max_tokens": max(1, self.max_tokens), "stop": self.stops or None}
        return {**super().passed(), **bounds, "stream": self.stream}


def _parts(messages: Any) -> list[Any]:
    """Return the parts of messages before validation."""
    listed = messages if isinstance(messages, list) else ()
    contents = [each.get("content") for each in listed if isinstance(each, dict)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _system(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    texts = [block.text for block in blocks]
    texts[:1] = [_BILLING.sub("", text, count=1) for text in texts[:1]]
    kept = "\n".join(filter(None, texts))
    return [{"role": "system", "content": kept}] if kept else []


def _chat_messages(message: Message) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat for one message: each result of a call is a message of its own."""
    if message.role == "assistant":
        yield _assistant(message.content)
        return
    for result, group in groupby(message.content, lambda block: block.type == "tool_result"):
        if not result:
            yield {"role": message.role, "content": [*map(_part, group)]}
            continue
        for block in group:
            content = [*map(_part, block.content)] or ""
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if not message.content:
        yield {"role": message.role, "content": ""}


def _part(block: Part) -> dict[str, Any]:
    if (source := block.source) is None:
        return {"type": "text", "text": block.text}
    inside = f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": inside if source.type == "base64" else source.url}}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant"}
    said["content"] = "\n".join(block.text for block in blocks if block.type == "text")
    if any(block.type == "thinking" for block in blocks):
        said["reasoning_content"] = "".join(block.thinking for block in blocks)
    for block in blocks:
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            call = {"id": block.id, "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
    return said


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": without_nulls(function)}


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
