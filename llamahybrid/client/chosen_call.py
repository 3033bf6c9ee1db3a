"""Chosen call: an answer that is the arguments of the tool which a chat chose.

Upstream takes all of the completion's text for the arguments, a thought that is ended at a budget included,
and every such answer for a whole call (llama_chat_format.py, _convert_completion_to_chat_function).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from llamahybrid.client.extras import asking, current_extras
from llamahybrid.client.model_markers import markers_of
from llamahybrid.client.stand_in import StandIn

Chunk = dict[str, Any]


def chooses_tool(options: Mapping[str, Any]) -> bool:
    """Return True if the answer to a chat is a call of one tool. `options`: the chat's arguments."""
    return isinstance(options.get("tool_choice"), dict) or isinstance(options.get("function_call"), dict)


class ChosenCall(StandIn):
    """Stands for the `Llama` in a chat format, for one answer: its completion is the arguments of a call."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._ended: str | None = None
        """The end of the completion: "length", say."""
        self._thought_end: str | None = None
        """The marker that ends the thought which the text begins with; None: behind it, or there is none."""
        self._text = ""

    def create_completion(self, prompt: Any, **options: Any) -> Any:
        """As `Llama.create_completion`, without the thought."""
        extras = current_extras()
        thinking = extras.thinking
        if thinking is not None and thinking.budget is not None:
            if isinstance(prompt, str):
                prompt = self._llm.tokenize(prompt.encode("utf-8"), special=True)
            if thinking.thought(self._llm, prompt).inside:
                self._thought_end = thinking.markers.end
                extras = replace(extras, spelt=extras.spelt | markers_of(self._llm).control)
        with asking(extras):
            made = self._llm.create_completion(prompt, **options)
        return self._read(made) if isinstance(made, dict) else self._stream(made)

    def into(self, made: Any) -> Any:
        """Return the chat's completion, or its chunks, with the end that the answer had."""
        return self._told(made) if isinstance(made, dict) else self._chunks(made)

    def _read(self, made: Chunk) -> Chunk:
        (choice,) = made["choices"]
        self._ended = choice["finish_reason"] or self._ended
        choice["text"] = self._arguments(choice["text"])
        return made

    def _stream(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        with closing(chunks):
            yield from map(self._read, chunks)

    def _arguments(self, piece: str) -> str:
        if self._thought_end is None:
            return piece
        self._text += piece
        _, found, rest = self._text.partition(self._thought_end)
        if not found or not rest.strip():
            return ""
        self._thought_end = None
        return rest.lstrip()

    def _told(self, made: Chunk) -> Chunk:
        for choice in made["choices"]:
            if choice["finish_reason"] == "tool_calls" and self._ended not in ("stop", None):
                choice["finish_reason"] = self._ended
        return made

    def _chunks(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        with closing(chunks):
            yield from map(self._told, chunks)
