"""Continuation: an answer that goes on from the beginning of it that the last message has.

The prompt is that of the messages before, then the thought and the text that are there, as the chat template
writes them; llama-server's way (common/chat.cpp, continue_final_message), so that it begins as the prompt of
the answer that was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llamahybrid.client.stand_in import StandIn
from llamahybrid.client.thought import ThoughtMarkers


@dataclass(frozen=True)
class Continuation:
    """The beginning of an answer."""

    said: str
    thought: str = ""
    markers: ThoughtMarkers | None = None
    """None: the thought is left out."""

    @classmethod
    def of(cls, messages: Sequence[Any], markers: ThoughtMarkers | None) -> Continuation:
        """Return that of messages. Raises ValueError where the last one begins no answer."""
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            raise ValueError("continue_final_message: the last message is not the assistant's")
        if last.get("tool_calls") or last.get("function_call"):
            raise ValueError("continue_final_message: an answer that calls tools is over")
        if len(messages) > 1 and messages[-2].get("role") == "assistant":
            raise ValueError("continue_final_message: the last two messages are the assistant's")
        content = last.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part.get("text", "") for part in content)
        return cls(content, last.get("reasoning_content") or "", markers)

    @property
    def inside(self) -> bool:
        """The answer goes on inside its thought."""
        return bool(self.thought and not self.said and self.markers is not None)

    def after(self, prompt: str) -> str:
        """The text that stands behind the prompt of the messages before."""
        markers = self.markers
        if markers is None:
            return self.said
        opened = prompt.rstrip().endswith(markers.begin)
        if not self.thought:
            return (markers.closing if opened else markers.bare) + self.said
        begun = "" if opened else markers.begin + markers.lead
        return f"{begun}{self.thought}{markers.closing if self.said else ''}{self.said}"


class Continuing(StandIn):
    """Stands for the `Llama` in a chat format, whose prompt has the beginning of the answer, too."""

    def __init__(self, llm: Any, continuation: Continuation) -> None:
        super().__init__(llm)
        self._continuation = continuation

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        """See `Llama.tokenize`."""
        more = self._continuation.after(text.decode("utf-8", "replace"))
        tokens: list[int] = self._llm.tokenize(text + more.encode("utf-8"), *args, **kwargs)
        return tokens
