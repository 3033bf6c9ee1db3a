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


def formatter(up: Any, model: Any) -> Any:
    """Upstream's formatter, that reads thinking which did not come to its end as its streams do.

    Whole, upstream takes it for the answer, with what begins it in the prompt.
    """

    class Formatter(up.OpenAIFormatter):  # type: ignore[misc]
        def convert_completion_response_to_chat(
            self, completion: Any, tool_name: str | None = None, **given: Any
        ) -> Any:
            made = super().convert_completion_response_to_chat(completion, tool_name, **given)
            if self.model.response_schema is not None:
                for choice, said in zip(made["choices"], completion.choices, strict=True):
                    if not _more(choice["message"]):
                        streamed = self._streamed(completion, said, tool_name, given)
                        choice["message"] = streamed if _more(streamed) else choice["message"]
            return made

        def _streamed(self, completion: Any, said: Any, tool_name: str | None, given: Chunk) -> Chunk:
            """The message that a stream tells, without calls; empty where it is unreadable."""
            chunk = {name: getattr(completion, name) for name in ("id", "created", "model")}
            chunk["choices"] = [{**said.model_dump(), "logprobs": None}]
            message: Chunk = {"role": "assistant", "content": ""}
            try:
                parts = self.convert_completion_chunk_to_chat_chunks(
                    chunk, set(), tool_name, parsed_states={}, **given
                )
            except Exception:  # as a stream is told as it is from there on
                return {}
            for delta in (choice["delta"] for part in parts for choice in part["choices"]):
                for name, value in delta.items():
                    if name != "role" and isinstance(value, str):
                        message[name] = message.get(name, "") + value
            return message

    return Formatter(model)


def _more(message: Chunk) -> bool:
    """It is more than an answer: thinking, or calls."""
    return not message.keys() <= {"role", "content"}


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
