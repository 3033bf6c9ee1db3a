"""Requests of `/v1/messages` and of its token counts, and the chats that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from llamahybrid.client.chat_template import unread
from llamahybrid.client.markers import markers_of
from llamahybrid.llama import Llama
from llamahybrid.server.anthropic import types
from llamahybrid.server.anthropic.message import MessageFormat
from llamahybrid.server.bodies import MOST_STOPS, MOST_TOOLS, ChatCompletionRequest, RequestBody
from llamahybrid.server.messages import normalized, require_few, without_nulls
from llamahybrid.server.options import First, Text, set_effort
from llamahybrid.server.request_fields import Route

_BILLING = re.compile(r"x-anthropic-billing-header:(\s*\w+=[^;\n]*;)+\s*")
"""Claude Code's first words, for Anthropic's servers. `cch` changes with each request, and no cached prompt
would match behind it (llama.cpp, tools/server/server-chat.cpp, and its PR 21793)."""

_SAME = {"model", "stream", "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "cache_salt"}
_SAME |= {"chat_template_kwargs", "grammar"}
"""Fields that pass through to the chat."""


class CountTokensRequest(RequestBody):
    """`/v1/messages/count_tokens`."""

    route: ClassVar = Route.COUNT_TOKENS

    model: str
    messages: Annotated[list[types.Message], First()] = Field(min_length=1)
    system: types.Texts = Field(default=[])
    tools: Annotated[list[types.Tool], First()] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: types.ToolChoice | None = None
    thinking: types.Thinking | None = None
    output_config: types.OutputConfig | None = None
    output_format: types.JsonFormat | None = Field(default=None, description="`output_config.format`.")
    context_management: types.ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template (llama-server)."
    )

    @classmethod
    def received(cls, said: dict[str, Any]) -> dict[str, Any]:
        """See `RequestBody.received`."""
        require_few(said.get("messages"))
        require_few(_parts(said.get("messages")))  # results of calls have parts, too
        return said

    @model_validator(mode="after")
    def _answerable(self) -> CountTokensRequest:
        choice = self.tool_choice
        if choice is not None and choice.type == "auto" and choice.disable_parallel_tool_use:
            raise ValueError("tool_choice.disable_parallel_tool_use goes with any or tool, not with auto")
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise ValueError("tool_choice.name is missing")
        return self

    def completion(self) -> ChatCompletionRequest:
        """See `RequestBody.completion`."""
        given = self.model_fields_set & _SAME & type(self).model_fields.keys()
        said: dict[str, Any] = {name: getattr(self, name) for name in given}
        said.setdefault("repeat_penalty", 1.0)  # Anthropic has no such penalty; upstream's default is 1.1
        said["messages"] = normalized([*_system(self.system), *_chat_messages(self.messages)])
        if isinstance(self.messages[-1], types.AssistantMessage):
            said["continue_final_message"] = True
        if self.tools:
            said["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            said["tool_choice"] = _choice(self.tool_choice)
        form = self.output_format or (self.output_config and self.output_config.format)
        if form:
            schema = {"name": "answer", "schema": form.schema_}
            said["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatCompletionRequest.model_validate({**said, **self._bounds()})

    def _bounds(self) -> dict[str, Any]:
        return {}

    def prepare(self, llm: Llama, body: ChatCompletionRequest) -> None:
        """Separate thinking from content in the answer, and switch it if the template can."""
        kind = self.thinking and self.thinking.type
        output = self.output_config or types.OutputConfig()
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
    """`/v1/messages`."""

    route: ClassVar = Route.MESSAGES
    answer_format: ClassVar = MessageFormat

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

    def _bounds(self) -> dict[str, Any]:
        return {"max_tokens": max(1, self.max_tokens), "stop": self.stops or None}


def _parts(messages: Any) -> list[Any]:
    """Return the parts of messages before validation."""
    listed = messages if isinstance(messages, list) else ()
    contents = [each.get("content") for each in listed if isinstance(each, dict)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _system(blocks: Sequence[types.TextBlock]) -> list[dict[str, Any]]:
    texts = [
        _BILLING.sub("", block.text, count=1) if number == 0 else block.text
        for number, block in enumerate(blocks)
    ]
    kept = [text for text in texts if text]
    return [{"role": "system", "content": "\n".join(kept)}] if kept else []


def _chat_messages(messages: Sequence[types.Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message, types.AssistantMessage):
            yield _assistant(message.content)
        elif isinstance(message, types.UserMessage):
            yield from _user(message.content)
        else:
            yield {"role": "system", "content": [_part(block) for block in message.content]}


def _user(blocks: Sequence[types.UserBlock]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user's blocks; each result of a call is a message of its own."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if not isinstance(block, types.ToolResultBlock):
            parts.append(_part(block))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        content = [_part(each) for each in block.content] or ""
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if parts or not blocks:
        yield {"role": "user", "content": parts or ""}


def _part(block: types.TextBlock | types.ImageBlock) -> dict[str, Any]:
    if isinstance(block, types.TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, types.Base64Source):
        url = f"data:{source.media_type};base64,{source.data}"
    else:
        url = source.url
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(blocks: Sequence[types.AssistantBlock]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, types.TextBlock)]
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, types.ThinkingBlock)]:
        said["reasoning_content"] = "".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, types.ToolUseBlock)
    ]
    return {**said, "tool_calls": calls} if calls else said


def _tool(tool: types.Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": without_nulls(function)}


def _choice(choice: types.ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
