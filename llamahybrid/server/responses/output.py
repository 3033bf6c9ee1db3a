"""The answer of a chat as a response: its output items, and the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from copy import deepcopy
from typing import Any

from llamahybrid.llama import Llama
from llamahybrid.server.errors import refusal
from llamahybrid.server.job import Chunk, Create
from llamahybrid.server.responses.request import ResponseRequest
from llamahybrid.server.usage import usage_so_far


class Output:
    """The output items of one response, and the events that report them.

    An item is a thought, a message, or a call of a tool. The next one closes it.
    """

    def __init__(self, response_id: str, freeform: frozenset[str]) -> None:
        """`freeform`: names of the tools whose input is text."""
        self.items: list[Chunk] = []
        self._response_id = response_id
        self._freeform = freeform
        self._call: int | None = None
        """Index of the call that the last item is."""
        self._arguments = ""
        self._open = False

    def add(self, delta: Chunk, logprobs: list[Any]) -> Iterator[Chunk]:
        """Yield the events of a delta of a chat, or of a whole message."""
        if text := delta.get("reasoning_content"):
            yield from self._text("reasoning", "reasoning_text", text, {})
        if text := delta.get("content"):
            yield from self._text("message", "output_text", text, {"logprobs": logprobs})
        for number, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", number), call["function"]
            if index != self._call:
                yield from self._start(self._new_call(call["id"], function["name"]))
                self._call = index
            if text := function.get("arguments"):
                self._arguments += text
                if self.items[-1]["type"] == "function_call":
                    self.items[-1]["arguments"] += text
                    yield self._event("function_call_arguments.delta", delta=text)

    def close(self, status: str = "completed") -> Iterator[Chunk]:
        """Yield the events that end the last item."""
        if not self._open:
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "custom_tool_call":
            item["input"] = freeform_input(self._arguments)
            yield self._event("custom_tool_call_input.delta", delta=item["input"])
            yield self._event("custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self._event("function_call_arguments.done", name=name, arguments=arguments)
        else:
            (part,) = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **logprobs)
            yield self._event("content_part.done", content_index=0, part=deepcopy(part))
        yield self._event("output_item.done", item=deepcopy(item))
        self._open, self._call, self._arguments = False, None, ""

    def _text(self, kind: str, part_kind: str, text: str, more: Chunk) -> Iterator[Chunk]:
        if not self._open or self.items[-1]["type"] != kind:
            part: Chunk = {"type": part_kind, "text": ""}
            item: Chunk = {"type": kind, "content": [part]}
            if kind == "message":
                item["role"] = "assistant"
                part |= {"annotations": [], "logprobs": []}
            else:
                item["summary"] = []
            yield from self._start(item)
            yield self._event("content_part.added", content_index=0, part=deepcopy(part))
        (part,) = self.items[-1]["content"]
        part["text"] += text
        for name, values in more.items():
            part[name] += values
        yield self._event(f"{part_kind}.delta", content_index=0, delta=text, **more)

    def _new_call(self, call_id: str, name: str) -> Chunk:
        if name in self._freeform:
            return {"type": "custom_tool_call", "call_id": call_id, "name": name, "input": ""}
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}

    def _start(self, item: Chunk) -> Iterator[Chunk]:
        yield from self.close()
        self._open = True
        item_id = f"item_{len(self.items)}_{self._response_id}"
        self.items.append({"id": item_id, "status": "in_progress", **item})
        yield self._event("output_item.added", item=deepcopy(self.items[-1]))

    def _event(self, kind: str, **more: Any) -> Chunk:
        """Return an event of the last item."""
        about = {} if "item" in more else {"item_id": self.items[-1]["id"]}
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, **about, **more}


def freeform_input(arguments: str) -> str:
    """Return the text that is the input of a freeform tool: the only argument of its call."""
    try:
        (text,) = json.loads(arguments).values()
    except (ValueError, AttributeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


class Telling:
    """Makes the response to one request, in that request's thread."""

    def __init__(self, llm: Llama, asked: ResponseRequest, alias: str) -> None:
        self._llm = llm
        self._asked = asked
        self._alias = alias

    def make(self, create: Create, **options: Any) -> Chunk | Generator[Chunk, None, None]:
        """Return the response, or its events, of what `create` makes: a chat completion or its chunks."""
        made = create(**options)
        return self._numbered(made) if options["stream"] else self._whole(made)

    def _whole(self, made: Chunk) -> Chunk:
        (choice,) = made["choices"]
        output, status = self._output(made), _status(choice["finish_reason"])
        for _ in (*output.add(choice["message"], _logprobs(choice)), *output.close(status)):
            pass
        return self._response(made, output, status)

    def _numbered(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
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

    def _events(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        output, reason, chunk = None, None, Chunk()
        with closing(chunks):
            for chunk in chunks:
                if output is None:
                    output = self._output(chunk)
                    for kind in ("created", "in_progress"):
                        response = self._response(chunk, output, "in_progress")
                        yield {"type": f"response.{kind}", "response": response}
                (choice,) = chunk["choices"]
                yield from output.add(choice["delta"], _logprobs(choice))
                reason = choice["finish_reason"] or reason
        if output is not None:
            status = _status(reason)
            yield from output.close(status)
            yield {"type": f"response.{status}", "response": self._response(chunk, output, status)}

    def _output(self, made: Chunk) -> Output:
        return Output(f"resp_{made['id']}", self._asked.freeform)

    def _response(self, made: Chunk, output: Output, status: str) -> Chunk:
        ended, asked = status != "in_progress", self._asked
        return {
            **asked.model_dump(by_alias=True, exclude={"input", "stream"}),
            **{"id": f"resp_{made['id']}", "object": "response", "created_at": float(made["created"])},
            "completed_at": time.time() if ended else None,
            **{"status": status, "error": None, "model": self._alias, "store": False},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": deepcopy(output.items),
            **{"previous_response_id": None, "truncation": "disabled"},
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> Chunk:
        used = usage_so_far(self._llm)
        cached = used.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        thoughts = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": used["total_tokens"],
        }


def _logprobs(choice: Chunk) -> list[Any]:
    return (choice.get("logprobs") or {}).get("content") or []


def _status(reason: str | None) -> str:
    """Return the status of a response. A cancelled one is incomplete: OpenAI's types have no other word."""
    return "incomplete" if reason in ("length", "cancelled") else "completed"
