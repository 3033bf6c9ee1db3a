"""The answer of a chat as Anthropic's message: content blocks, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from llamahybrid.llama import Llama
from llamahybrid.server.anthropic.request import MessagesRequest
from llamahybrid.server.heard import Heard
from llamahybrid.server.job import Chunk, Create
from llamahybrid.server.usage import usage_so_far

_STARTS: dict[str, Chunk] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class Blocks:
    """The content blocks of one answer, and the events that report them."""

    def __init__(self) -> None:
        self.content: list[Chunk] = []
        """The last block is complete once it is closed."""
        self._open = False
        self._call: int | None = None
        """Index of the call that the last block is."""
        self._arguments = ""
        self.whole = True
        """The arguments of each call are JSON."""

    def add(self, delta: Chunk) -> Iterator[Chunk]:
        """Yield the events of a delta of a chat, or of a whole message."""
        for name, kind in (("reasoning_content", "thinking"), ("content", "text")):
            if text := delta.get(name):
                if not self._open or self.content[-1]["type"] != kind:
                    yield from self._start(_STARTS[kind])
                self.content[-1][kind] += text
                yield self._delta({"type": f"{kind}_delta", kind: text})
        for number, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", number), call["function"]
            if index != self._call:
                begun = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                yield from self._start(begun)
                self._call = index
            if text := function.get("arguments"):
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[Chunk]:
        """Yield the events that end the last block."""
        if not self._open:
            return
        self._open = False
        block = self.content[-1]
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        elif block["type"] == "tool_use":
            self._call = None
            block["input"], whole = _input(self._arguments)
            self.whole &= whole
            self._arguments = ""
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _start(self, block: Chunk) -> Iterator[Chunk]:
        yield from self.close()
        self._open = True
        self.content.append({**block})
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block}

    def _delta(self, delta: Chunk) -> Chunk:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _input(arguments: str) -> tuple[Chunk, bool]:
    """Return the input of a call, and True if its arguments are a JSON object."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}, False
    return (found, True) if isinstance(found, dict) else ({}, False)


class Telling:
    """Makes the message of one request, in that request's thread."""

    def __init__(self, llm: Llama, asked: MessagesRequest, alias: str) -> None:
        self._llm = llm
        self._asked = asked
        self._alias = alias
        self._heard = Heard(asked.stops)
        self._blocks = Blocks()

    def make(self, create: Create, **options: Any) -> Chunk | Generator[Chunk, None, None]:
        """Return the message, or its events, of what `create` makes: a chat completion or its chunks."""
        with self._heard.listening():
            made = create(**options)
        return self._events(made) if options["stream"] else self._whole(made)

    def _whole(self, made: Chunk) -> Chunk:
        (choice,) = made["choices"]
        for _ in self._said(choice["message"]):
            pass
        for _ in self._blocks.close():
            pass
        message = self._begun(made["id"])
        message |= {"content": self._blocks.content, **self._stop(choice["finish_reason"])}
        return message

    def _events(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        reason: str | None = None
        begun = False
        with closing(chunks):
            for chunk in chunks:
                (choice,) = chunk["choices"]
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._begun(chunk["id"])}
                yield from self._said(choice["delta"])
                reason = choice["finish_reason"] or reason
        if begun:
            yield from self._blocks.close()
            yield {"type": "message_delta", "delta": self._stop(reason), "usage": self._usage()}
            yield {"type": "message_stop"}

    def _said(self, delta: Chunk) -> Iterator[Chunk]:
        return self._blocks.add(delta) if self._asked.max_tokens else iter(())

    def _begun(self, number: str) -> Chunk:
        """Return the message at its start."""
        return {
            **{"id": f"msg_{number}", "type": "message", "role": "assistant", "model": self._alias},
            **{"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()},
        }

    def _usage(self) -> Chunk:
        """Return the usage: decoded tokens are input, and no token counts as cache creation."""
        told = usage_so_far(self._llm)
        cached = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": told["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": told["completion_tokens"] if self._asked.max_tokens else 0,
        }

    def _stop(self, reason: str | None) -> Chunk:
        """Return the stop reason by the finish reason of the chat."""
        used, cut = usage_so_far(self._llm), "max_tokens"
        full = used["total_tokens"] >= self._llm.n_ctx() - 1
        if full and used["completion_tokens"] < self._asked.max_tokens:
            cut = "model_context_window_exceeded"
        if reason in ("tool_calls", "function_call"):  # upstream, also for truncated calls
            return {"stop_reason": "tool_use" if self._blocks.whole else cut, "stop_sequence": None}
        if reason == "length":
            return {"stop_reason": cut, "stop_sequence": None}
        if reason != "stop":  # it was cancelled
            return {"stop_reason": "pause_turn", "stop_sequence": None}
        found = self._heard.stop_sequence(self._llm)
        return {"stop_reason": "stop_sequence" if found else "end_turn", "stop_sequence": found}
