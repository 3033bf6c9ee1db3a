"""The answer of a chat as a response: its output items, and the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from typing import Any

from llamahybrid.server.answer_format import EventFormat, Events, Part, Parts, Step
from llamahybrid.server.errors import refusal
from llamahybrid.server.job import Chunk
from llamahybrid.server.usage import usage_so_far


def freeform_input(arguments: str) -> str:
    """Return the text that is the input of a freeform tool: the only argument of its call."""
    try:
        (text,) = json.loads(arguments).values()
    except (ValueError, AttributeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


class ResponseFormat(EventFormat):
    """The response to one request."""

    def events(self, chunks: Events) -> Events:
        """See `EventFormat.events`."""
        number, began, events = 0, None, self._events(chunks)
        try:
            for number, event in enumerate(events, 1):
                yield {**event, "sequence_number": number}
                began = began or event
        except Exception as error:
            if began is not None:
                refused = refusal(error)
                fault = {"code": refused.code or "server_error", "message": refused.message}
                response = {**began["response"], "status": "failed", "error": fault}
                yield {"type": "response.failed", "response": response, "sequence_number": number + 1}
            raise
        finally:
            events.close()

    def whole(self, events: list[Chunk]) -> Chunk:
        """See `EventFormat.whole`."""
        response: Chunk = events[-1]["response"]
        return response

    def _events(self, chunks: Events) -> Events:
        parts, reason, chunk = Parts(), None, Chunk()
        self._items: list[Chunk] = []
        self._response_id = ""
        with closing(chunks):
            for chunk in chunks:
                if not self._response_id:
                    self._response_id = f"resp_{chunk['id']}"
                    for kind in ("created", "in_progress"):
                        response = self._response(chunk, "in_progress")
                        yield {"type": f"response.{kind}", "response": response}
                (choice,) = chunk["choices"]
                logprobs = (choice.get("logprobs") or {}).get("content") or []
                yield from self._item_events(parts.add(choice["delta"]), logprobs)
                reason = choice["finish_reason"] or reason
        if self._response_id:
            # A cancelled response is incomplete, too: OpenAI's types have no other word.
            status = "incomplete" if reason in ("length", "cancelled") else "completed"
            yield from self._item_events(parts.end(), status=status)
            yield {"type": f"response.{status}", "response": self._response(chunk, status)}

    def _item_events(
        self, steps: Iterable[Step], logprobs: Sequence[Any] = (), status: str = "completed"
    ) -> Iterator[Chunk]:
        """Yield the events of steps. `logprobs`: of text. `status`: of an item that ends."""
        for step, part, text in steps:
            if step == "begin":
                self._items.append(self._item(part))
                yield self._event("output_item.added", item=deepcopy(self._items[-1]))
            item = self._items[-1]
            if step == "end":
                item["status"] = status
            if part.kind == "call":
                yield from self._call(item, step, part.text, text)
            else:
                yield from self._content(item, step, text, logprobs)
            if step == "end":
                yield self._event("output_item.done", item=deepcopy(item))

    def _item(self, part: Part) -> Chunk:
        """Return the item of a part at its beginning."""
        item: Chunk = {"id": f"item_{len(self._items)}_{self._response_id}", "status": "in_progress"}
        if part.kind == "call":
            freeform = part.name in self.asked.freeform
            kind, field = ("custom_tool_call", "input") if freeform else ("function_call", "arguments")
            return {**item, "type": kind, "call_id": part.call_id, "name": part.name, field: ""}
        if part.kind == "thought":
            content: Chunk = {"type": "reasoning_text", "text": ""}
            return {**item, "type": "reasoning", "content": [content], "summary": []}
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {**item, "type": "message", "content": [content], "role": "assistant"}

    def _content(self, item: Chunk, step: str, text: str, logprobs: Sequence[Any]) -> Iterator[Chunk]:
        """Yield the events of a thought or a text."""
        (content,) = item["content"]
        kind, at = content["type"], {"content_index": 0}
        if step == "begin":
            yield self._event("content_part.added", **at, part=deepcopy(content))
        elif step == "more":
            content["text"] += text
            more = {}
            if "logprobs" in content:
                content["logprobs"] += logprobs
                more = {"logprobs": logprobs}
            yield self._event(f"{kind}.delta", **at, delta=text, **more)
        else:
            more = {name: content[name] for name in ("text", "logprobs") if name in content}
            yield self._event(f"{kind}.done", **at, **more)
            yield self._event("content_part.done", **at, part=deepcopy(content))

    def _call(self, item: Chunk, step: str, arguments: str, text: str) -> Iterator[Chunk]:
        """Yield the events of a call. The input of a freeform tool has one delta."""
        if item["type"] == "function_call":
            item["arguments"] = arguments
            if step == "more":
                yield self._event("function_call_arguments.delta", delta=text)
            elif step == "end":
                yield self._event("function_call_arguments.done", name=item["name"], arguments=arguments)
        elif step == "end":
            item["input"] = freeform_input(arguments)
            yield self._event("custom_tool_call_input.delta", delta=item["input"])
            yield self._event("custom_tool_call_input.done", input=item["input"])

    def _event(self, kind: str, **more: Any) -> Chunk:
        """Return an event of the last item."""
        about = {} if "item" in more else {"item_id": self._items[-1]["id"]}
        return {"type": f"response.{kind}", "output_index": len(self._items) - 1, **about, **more}

    def _response(self, made: Chunk, status: str) -> Chunk:
        ended, asked = status != "in_progress", self.asked
        return {
            **asked.model_dump(by_alias=True, exclude={"input", "stream"}),
            **{"id": self._response_id, "object": "response", "created_at": float(made["created"])},
            "completed_at": time.time() if ended else None,
            **{"status": status, "error": None, "model": self.alias, "store": False},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": deepcopy(self._items),
            **{"previous_response_id": None, "truncation": "disabled"},
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> Chunk:
        used = usage_so_far(self.llm)
        cached = used.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        thoughts = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": used["total_tokens"],
        }
