"""The answer of a chat as Anthropic's message: content blocks, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import closing

from llamahybrid.server.answer_format import EventFormat, Events, Part, Parts, Step, event
from llamahybrid.server.errors import Refusal
from llamahybrid.server.job import Chunk
from llamahybrid.server.usage import usage_so_far


def _block(part: Part) -> Chunk:
    """Return the block of a part at its beginning."""
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if part.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _input(arguments: str) -> tuple[Chunk, bool]:
    """Return the input of a call, and True if its arguments are a JSON object."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}, False
    return (found, True) if isinstance(found, dict) else ({}, False)


class MessageFormat(EventFormat):
    """The message that answers one request."""

    silence = event({"type": "ping"})
    end = b""

    @staticmethod
    def failed(refused: Refusal) -> bytes:
        """See `AnswerFormat.failed`."""
        return event(refused.anthropic)

    def events(self, chunks: Events) -> Events:
        """See `EventFormat.events`."""
        parts = Parts()
        self._content: list[Chunk] = []
        self._whole_calls = True
        reason: str | None = None
        begun = False
        with closing(chunks):
            for chunk in chunks:
                (choice,) = chunk["choices"]
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._begun(chunk["id"])}
                if self.asked.max_tokens:
                    yield from self._block_events(parts.add(choice["delta"]))
                reason = choice["finish_reason"] or reason
        if begun:
            yield from self._block_events(parts.end())
            yield {"type": "message_delta", "delta": self._stop(reason), "usage": self._usage()}
            yield {"type": "message_stop"}

    def _block_events(self, steps: Iterable[Step]) -> Iterator[Chunk]:
        for step, part, text in steps:
            if step == "begin":
                block = _block(part)
                self._content.append(block)
                yield self._event("start", content_block={**block})
            elif step == "more":
                yield self._event("delta", delta=self._grown(part.kind, text))
            else:
                if part.kind == "thought":
                    yield self._event("delta", delta={"type": "signature_delta", "signature": ""})
                elif part.kind == "call":
                    self._content[-1]["input"], whole = _input(part.text)
                    self._whole_calls &= whole
                yield self._event("stop")

    def _grown(self, kind: str, text: str) -> Chunk:
        """Add text to the last block; return its delta."""
        if kind == "call":
            return {"type": "input_json_delta", "partial_json": text}
        block = self._content[-1]
        name = block["type"]
        block[name] += text
        return {"type": f"{name}_delta", name: text}

    def _event(self, kind: str, **more: Chunk) -> Chunk:
        return {"type": f"content_block_{kind}", "index": len(self._content) - 1, **more}

    def whole(self, events: list[Chunk]) -> Chunk:
        """See `EventFormat.whole`."""
        begun, end = events[0]["message"], events[-2]
        return {**begun, **end["delta"], "content": self._content, "usage": end["usage"]}

    def _begun(self, number: str) -> Chunk:
        """Return the message at its start."""
        return {
            **{"id": f"msg_{number}", "type": "message", "role": "assistant", "model": self.alias},
            **{"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()},
        }

    def _usage(self) -> Chunk:
        """Return the usage: decoded tokens are input, and no token counts as cache creation."""
        told = usage_so_far(self.llm)
        cached = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": told["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": told["completion_tokens"] if self.asked.max_tokens else 0,
        }

    def _stop(self, reason: str | None) -> Chunk:
        """Return the stop reason by the finish reason of the chat."""
        used, cut = usage_so_far(self.llm), "max_tokens"
        full = used["total_tokens"] >= self.llm.n_ctx() - 1
        if full and used["completion_tokens"] < self.asked.max_tokens:
            cut = "model_context_window_exceeded"
        if reason in ("tool_calls", "function_call"):  # upstream, also for truncated calls
            return {"stop_reason": "tool_use" if self._whole_calls else cut, "stop_sequence": None}
        if reason == "length":
            return {"stop_reason": cut, "stop_sequence": None}
        if reason != "stop":  # it was cancelled
            return {"stop_reason": "pause_turn", "stop_sequence": None}
        found = self.stop_sequence()
        return {"stop_reason": "stop_sequence" if found else "end_turn", "stop_sequence": found}
