"""Types of Anthropic's requests, as the `anthropic` package has them (message_create_params.py).

A text as content is one block of text. Blocks and tools of other types, as those that Anthropic's servers
run, get 400. Other fields of a block are ignored: `signature`, `is_error`, and `cache_control`, as the start
of each message has a checkpoint anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from llamahybrid.server.messages import MOST_PARTS
from llamahybrid.server.options import First


class TextBlock(BaseModel):
    """Text."""

    type: Literal["text"]
    text: str


class Base64Source(BaseModel):
    """An image in the request."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(BaseModel):
    """An image elsewhere."""

    type: Literal["url"]
    url: str


class ImageBlock(BaseModel):
    """An image; 400 unless the model reads images, as in chat completions."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(BaseModel):
    """Thinking of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    """Encrypted thinking of another server; left out of the prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Shorthand = BeforeValidator(_blocks)
_Few = Field(max_length=MOST_PARTS)
_ByType = Field(discriminator="type")

Texts: TypeAlias = Annotated[list[TextBlock], First(), _Few, _Shorthand]
Pictured: TypeAlias = Annotated[list[Annotated[TextBlock | ImageBlock, _ByType]], First(), _Few, _Shorthand]


class ToolResultBlock(BaseModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Pictured = []


UserBlock: TypeAlias = Annotated[TextBlock | ImageBlock | ToolResultBlock, _ByType]
AssistantBlock: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, _ByType
]


class UserMessage(BaseModel):
    """A turn of the user, with results of calls."""

    role: Literal["user"]
    content: Annotated[list[UserBlock], First(), _Few, _Shorthand]


class AssistantMessage(BaseModel):
    """A turn of the model."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], First(), _Few, _Shorthand]


class SystemMessage(BaseModel):
    """An instruction between turns."""

    role: Literal["system"]
    content: Texts


Message: TypeAlias = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


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
