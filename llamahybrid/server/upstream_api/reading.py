"""Reading: what a model has said as chat completions, their chunks and responses, by upstream's parsers."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel

from llamahybrid.server.answer import Chunk

logger = logging.getLogger("llamahybrid.server")


class Reading:
    """How the answers to one request are read: by the schema, or as they are where they are not like it."""

    def __init__(self, formatter: Any, plain: Any, parts: Any, functions: Any, tools: Any) -> None:
        self._formatter = formatter
        self._plain = plain
        self._given = {"tools": tools, "generation_prompt": parts.generation_prompt}
        self._functions = functions
        self._tool_name = parts.tool_name
        self._started: set[int] = set()
        self._parsed: dict[int, Any] = {}
        self._unreadable: set[int] = set()

    def whole(self, completion: Any) -> Chunk:
        """The chat completion of a completion."""
        return self._read("convert_completion_response_to_chat", completion, functions=self._functions)

    def response(self, completion: Any, body: Any) -> Chunk:
        """The response of a completion."""
        return self._read("convert_completion_response_to_response", completion, body)

    def _read(self, convert: str, completion: Any, *more: Any, **given: Any) -> Chunk:
        given |= self._given
        try:
            return _as_dict(getattr(self._formatter, convert)(completion, *more, self._tool_name, **given))
        except Exception as error:  # a parser of upstream's met what a model said
            _tell_unreadable(error)
            return _as_dict(getattr(self._plain, convert)(completion, *more, self._tool_name, **given))

    def chunks(self, chunk: Chunk) -> list[Chunk]:
        """The chat chunks of a completion's chunk, which has one choice."""
        (choice,) = chunk["choices"]
        chunk = {**chunk, "choices": [{**choice, "finish_reason": finish_reason(choice)}]}
        index = choice["index"]
        formatter = self._plain if index in self._unreadable else self._formatter
        try:
            made = self._convert(formatter, chunk)
        except Exception as error:
            if formatter is self._plain:
                raise
            _tell_unreadable(error)
            self._unreadable.add(index)
            made = self._convert(self._plain, chunk)
        told = [_as_dict(each) for each in made]
        for each in told:
            for part in each["choices"]:
                part.setdefault("finish_reason", None)
        return told

    def _convert(self, formatter: Any, chunk: Chunk) -> list[Any]:
        made: list[Any] = formatter.convert_completion_chunk_to_chat_chunks(
            chunk,
            self._started,
            self._tool_name,
            functions=self._functions,
            parsed_states=self._parsed,
            **self._given,
        )
        return made


def finish_reason(choice: Chunk) -> str | None:
    """Why an answer ended, in a word that OpenAI has."""
    reason: str | None = choice["finish_reason"]
    return "length" if reason == "cancelled" else reason


def _tell_unreadable(error: Exception) -> None:
    """Without its text, which the answer is in."""
    logger.warning(
        "an answer is not written as the schema says: %s; it is told as it is", type(error).__name__
    )


def _as_dict(made: Any) -> Chunk:
    told: Chunk = made.model_dump(mode="json", exclude_none=True) if isinstance(made, BaseModel) else made
    return told
