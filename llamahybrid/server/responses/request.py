"""Requests of `/v1/responses`, and the chats that they become.

Fields as in OpenAI's API reference (openai.types.responses.response_create_params).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, Field, model_validator

from llamahybrid.client.chat_template import template_of
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import MOST_TOOLS, ChatCompletionRequest, First, RequestBody, at_most
from llamahybrid.server.messages import require_few, without_nulls
from llamahybrid.server.options import set_effort
from llamahybrid.server.request_fields import Route
from llamahybrid.server.responses.output import ResponseFormat

MOST_METADATA = 16
"""Pairs, as OpenAI's. The response repeats them; nothing else uses them."""

FIRST_ONLY = "must be at the beginning"
"""Part of the error that Qwen's templates raise for a later system message."""

CLIENT_TOOLS = ("function", "custom")
"""Types of tools that the client runs."""

SERVER_TOOLS = ("code_interpreter", "file_search", "image_generation", "mcp", "namespace", "web_search")
"""First parts of the types of tools that OpenAI's servers run (some have a date behind)."""

Json: TypeAlias = dict[str, Any]


class ToolFormat(BaseModel):
    """The input format of a freeform tool; the model sees it as text."""

    syntax: str = ""
    definition: str = ""


class Tool(BaseModel):
    """A tool that the client runs, or one of OpenAI's: agents always list these, so they are left out."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Json | None = None
    format: ToolFormat = ToolFormat()

    @model_validator(mode="after")
    def _named(self) -> Tool:
        if self.type not in CLIENT_TOOLS and not self.type.startswith(SERVER_TOOLS):
            raise ValueError(f"tools of type {self.type} are not supported")
        if self.type in CLIENT_TOOLS and not self.name:
            raise ValueError("a tool needs a name")
        return self

    def chat_tool(self) -> Json:
        """Return the tool as chats have it. A freeform tool becomes a function with one text argument."""
        description, parameters = self.description, self.parameters
        if self.type == "custom":
            text = {"type": "string", "description": "The raw input of this tool."}
            parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
            form = f"{self.format.syntax}:\n{self.format.definition}" if self.format.definition else None
            description = "\n\n".join(filter(None, (description, form))) or None
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": without_nulls(function)}


class ToolChoice(BaseModel):
    """The tool that the answer has to call."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(BaseModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: Json | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _with_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("a format of type json_schema needs a schema")
        return self


class TextOptions(BaseModel):
    """Options of the text of an answer."""

    format: TextFormat = TextFormat(type="text")


class Reasoning(BaseModel):
    """Options of thinking."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseRequest(RequestBody):
    """Answer input items (OpenAI's Responses, stateless). Sampling and cache options are those of chats."""

    route: ClassVar = Route.RESPONSES
    answer_format: ClassVar = ResponseFormat
    shared: ClassVar = frozenset({"temperature", "top_p"})

    model: str | None = None
    input: str | list[Any] = ""
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: Annotated[list[Tool], First()] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = Field(default=True, description="Without effect.")
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    metadata: Annotated[dict[str, str], at_most(MOST_METADATA)] = Field(default={})

    @classmethod
    def received(cls, said: Json) -> Json:
        """See `RequestBody.received`."""
        require_few(said.get("input"))
        return said

    @property
    def freeform(self) -> frozenset[str]:
        """Names of the tools whose input is text."""
        return frozenset(tool.name for tool in self.tools if tool.type == "custom")

    def completion(self) -> ChatCompletionRequest:
        """See `RequestBody.completion`."""
        said = self.passed()
        said |= {"model": self.model, "stream": self.stream, "max_tokens": self.max_output_tokens}
        said["messages"] = list(chat_messages(self.instructions, self.input))
        if tools := [tool.chat_tool() for tool in self.tools if tool.type in CLIENT_TOOLS]:
            said |= {"tools": tools, "tool_choice": self.tool_choice}
            if isinstance(self.tool_choice, ToolChoice):
                said["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        form = self.text.format
        if form.type != "text":
            schema = {"name": form.name, "schema": form.schema_}
            said["response_format"] = {"type": form.type, "json_schema": schema if form.schema_ else None}
        if self.top_logprobs is not None:
            said |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        said |= {"reasoning_format": "auto", "continue_final_message": False}
        return ChatCompletionRequest.model_validate(said)

    def prepare(self, llm: Llama, body: ChatCompletionRequest) -> None:
        """See `RequestBody.prepare`."""
        set_effort(llm, body, self.reasoning.effort)
        if FIRST_ONLY in (template_of(llm) or ""):
            for message in body.messages[1:]:
                if message["role"] == "system":
                    message["role"] = "user"


def chat_messages(instructions: str | None, given: str | list[Any]) -> Iterator[Json]:
    """Yield the messages of a chat. Raises ValueError for an item that no chat has.

    Adjacent system messages become one, and so do the items of one assistant turn: templates want it so.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    lead = [{"role": "system", "content": instructions}] if instructions else []
    for role, turn in groupby([*lead, *map(_message, items)], itemgetter("role")):
        if role == "system":
            yield {"role": role, "content": "\n\n".join(_text(message["content"]) for message in turn)}
        elif role == "assistant":
            yield _turn(list(turn))
        else:
            yield from turn


def _turn(messages: list[Json]) -> Json:
    """Join the thoughts, the texts and the calls of an assistant's turn."""
    joined: Json = {"role": "assistant", "content": "".join(each.get("content", "") for each in messages)}
    if thought := "".join(each.get("reasoning_content", "") for each in messages):
        joined["reasoning_content"] = thought
    if calls := [each["call"] for each in messages if "call" in each]:
        joined["tool_calls"] = calls
    return joined


def _message(item: Any) -> Json:
    """Return one input item as a message, or as a part of the assistant's turn."""
    if not isinstance(item, dict):
        raise ValueError("input: each item is an object")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role, content = item.get("role", "user"), _content(item.get("content", ""))
        role = "system" if role == "developer" else role
        return {"role": role, "content": _text(content) if role == "assistant" else content}
    if kind == "reasoning":
        thought = _content(item.get("content") or item.get("summary") or "")
        return {"role": "assistant", "reasoning_content": _text(thought)}
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "call": _call(item)}
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = _content(item.get("output", ""))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    raise ValueError(f"input: an item of type {kind!r} is not supported")


def _content(content: Any) -> str | list[Json]:
    """Return content as chats have it: texts as one text, images as parts."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content] if isinstance(content, list) else [_part(content)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any) -> Json:
    said = part if isinstance(part, dict) else {}
    text, url = said.get("text", said.get("refusal")), said.get("image_url")
    if isinstance(text, str):
        return {"type": "text", "text": text}
    if said.get("type") == "input_image" and isinstance(url, str):
        return {"type": "image_url", "image_url": {"url": url}}
    raise ValueError(f"input: content of type {said.get('type')!r} is not supported")


def _text(content: str | list[Json]) -> str:
    if isinstance(content, str):
        return content
    raise ValueError("input: only messages of the user hold images")


def _call(item: Json) -> Json:
    """Return a call of a tool. Arguments that are no JSON object, as of freeform tools, become its input."""
    freeform = item["type"] == "custom_tool_call"
    text = item.get("input" if freeform else "arguments") or ""
    if not isinstance(text, str):
        raise ValueError("input: the arguments of a call are a text")
    try:
        whole = not freeform and (not text.strip() or isinstance(json.loads(text), dict))
    except (ValueError, RecursionError):
        whole = False
    arguments = (text.strip() or "{}") if whole else json.dumps({"input": text}, ensure_ascii=False)
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}
