"""Chat completions and their chunks with tool calls and thinking in their own fields."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias

from llamahybrid.client.chat_way import continuation_of
from llamahybrid.client.markers import begins_thinking, markers_of
from llamahybrid.llama import Llama
from llamahybrid.server.answer_parser import AnswerParser, Delta
from llamahybrid.server.bodies import ChatCompletionRequest
from llamahybrid.server.harmony_parser import HarmonyParser
from llamahybrid.server.options import goes_on

Chunk = dict[str, Any]


Parser: TypeAlias = AnswerParser | HarmonyParser
"""A parser of one answer."""


class ChatParser:
    """Parses the answers to one request, in its thread."""

    def __init__(self, make: Callable[[], Parser], control: frozenset[int] = frozenset()) -> None:
        """`make`: makes a parser of one answer. `control`: control tokens that its text has to contain."""
        self._parsers = defaultdict[int, Parser](make)
        self.control = control

    def into(self, made: Any) -> Any:
        """Read a completion, or a stream of chunks."""
        return self._whole(made) if isinstance(made, dict) else self._stream(made)

    def _whole(self, made: Chunk) -> Chunk:
        for choice in made["choices"]:
            parser, message = self._parsers[choice["index"]], choice["message"]
            text = message.get("content") or ""
            told: Delta = {}
            for delta in (*parser.feed(text), *parser.end()):
                for name, value in delta.items():
                    told[name] = told[name] + value if name in told else value
            for call in told.get("tool_calls", ()):
                del call["index"]
            called = parser.calls or message.get("tool_calls")
            choice["message"] = {**message, "content": None if called else "", **told}
            choice["finish_reason"] = reason(parser, choice["finish_reason"])
        return made

    def _stream(self, chunks: Any) -> Generator[Chunk, None, None]:
        assert isinstance(chunks, Generator), "streams are generators"
        with closing(chunks):
            for chunk in chunks:
                yield from self._chunks(chunk)

    def _chunks(self, chunk: Chunk) -> Iterator[Chunk]:
        (choice,) = chunk["choices"]
        parser, delta, ended = self._parsers[choice["index"]], choice["delta"], choice["finish_reason"]
        told = list(parser.feed(delta["content"])) if delta.get("content") else []
        rest: Delta = {name: value for name, value in delta.items() if name != "content"}
        if ended is None:
            first, *told = told or [{}]
            yield {**chunk, "choices": [{**choice, "delta": {**rest, **first}}]}
        else:
            told += parser.end()
        for each in told:
            more = {"index": choice["index"], "delta": each, "logprobs": None, "finish_reason": None}
            yield {**chunk, "choices": [more]}
        if ended is not None:
            yield {**chunk, "choices": [{**choice, "finish_reason": reason(parser, ended), "delta": rest}]}


def reason(parser: Parser, ended: str | None) -> str | None:
    """Return the finish reason of an answer that may have called tools."""
    return "tool_calls" if parser.calls and ended == "stop" else ended


def chat_parser_of(
    llm: Llama, body: ChatCompletionRequest, template: Mapping[str, Any], budget: int | None
) -> ChatParser | None:
    """Return the parser of the answers to a chat; None if upstream's completions need no parsing.

    `template`: variables of the chat template. `budget`: of a thought. The end of a thought that is ended at
    once is not left in the content, nor is any thought beside JSON or a regular expression.
    """
    free = body.tool_choice in (None, "auto") and body.function_call in (None, "auto")
    tools: list[Any] = list(body.tools or ()) if free and body.parse_tool_calls else []
    form: Any = body.response_format or {}
    if body.guided_regex is not None or form.get("type") == "json_object":
        think = budget is not None  # else the form holds from the first token: no thought comes before it
    else:
        think = body.reasoning_format != "none" or budget == 0
    if not (tools or think):
        return None
    markers = markers_of(llm)
    think = think and markers.think is not None
    if markers.think is not None and body.grammar is not None and budget is None:
        think = think and markers.think.end in body.grammar  # it holds from the first token, too
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    begun = continuation_of(llm, body.messages) if goes_on(llm, body) else None
    if (channels := markers.channels) is not None:
        inside = begun is not None and begun.inside
        header = f"{channels.channel}{channels.thought if inside else ''}" if begun is not None else None
        return ChatParser(partial(HarmonyParser, channels, bool(tools), think, header), markers.control)
    if not (think or (schemas and markers.call)):
        return None
    thinking = think and (begins_thinking(llm, template) if begun is None else begun.inside)
    make = partial(AnswerParser, markers, schemas, think, thinking, begun is not None)
    return ChatParser(make, markers.control)
