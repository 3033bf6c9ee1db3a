"""Chats: one answer to messages, with the arguments that upstream does not have."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llama_cpp import llama_chat_format

from llamahybrid.client.chat_template import chat_with, handler_of, template_of
from llamahybrid.client.completion import keeps_rows
from llamahybrid.client.extras import StandIn, asking, current_extras
from llamahybrid.client.json_schema import schema_grammar
from llamahybrid.client.markers import markers_of
from llamahybrid.client.thought import Thinking, ThoughtMarkers

Chunk = dict[str, Any]


def chat_answer(
    llm: Any,
    template: Mapping[str, Any],
    budget: int | None,
    message: str,
    continues: bool,
    **options: Any,
) -> Any:
    """Return the completion of a chat, or its chunks; `options`: upstream's arguments.

    `template`: variables of the chat template. `budget`: tokens of a thought; None, or less than 0: no bound;
    `message`: text that a thought ends with where it is ended. `continues`: the answer goes on from the last
    message. A chat handler of the program's own has the whole context. Raises ValueError for what cannot be
    had.
    """
    loop, handler = llm.requests.loop, llm.chat_handler
    begun = continuation_of(llm, options["messages"]) if continues else None
    extras = replace(current_extras(), schema=schema_grammar(options))
    thinking = _thinking(llm, begun, None if budget is None or budget < 0 else budget, message)
    model, chosen = llm, None
    if begun is not None:
        model, options["messages"] = Continuing(llm, begun), options["messages"][:-1]
    if loop is not None and handler is None and _chooses_tool(options) and _is_upstreams(handler_of(llm)):
        model = chosen = ChosenCall(model)
        if thinking is not None and thinking.budget is not None:
            thinking = replace(thinking, hidden=True)
            extras = replace(extras, spelt=extras.spelt | markers_of(llm).control)
    if thinking is not None:
        extras = replace(extras, thinking=thinking)
    make = partial(chat_with, model, template, **options)
    with asking(extras):
        if loop is None or handler is None or loop.here:
            made = make()
        else:
            made = llm.requests.whole(make, completing=True, rows=keeps_rows(llm, options))
    return made if chosen is None else changed(made, chosen.told)


def _thinking(llm: Any, begun: Continuation | None, budget: int | None, message: str) -> Thinking | None:
    """The thinking of an answer; None where that of the context stays."""
    think = markers_of(llm).think
    if budget is not None and think is None:
        raise ValueError("thinking_budget: the chat template of this model shows no thinking")
    if think is None or (budget is None and llm.requests.loop is None):
        return None
    inside = begun.inside if begun is not None and (begun.said or begun.thought) else None
    return Thinking(think, budget, message, inside)


# -- an answer that goes on ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Continuation:
    """The beginning of an answer.

    The prompt is that of the messages before, then the thought and the text that are there, as the chat
    template writes them: as the prompt of the answer that was cut off (llama-server's way, common/chat.cpp,
    continue_final_message).
    """

    said: str
    thought: str = ""
    markers: ThoughtMarkers | None = None
    """None: the thought is left out."""

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


def continuation_of(llm: Any, messages: Sequence[Any]) -> Continuation:
    """Return the beginning of the answer that the last message has.

    Raises ValueError where it has none, or the model's chat format is no template.
    """
    if template_of(llm) is None:
        raise ValueError(f"continue_final_message: the chat format {llm.chat_format!r} is no template")
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
    return Continuation(content, last.get("reasoning_content") or "", markers_of(llm).think)


# -- an answer that is a call of one tool ----------------------------------------------------------------


def _chooses_tool(options: Mapping[str, Any]) -> bool:
    return isinstance(options.get("tool_choice"), dict) or isinstance(options.get("function_call"), dict)


def _is_upstreams(handler: Callable[..., Any]) -> bool:
    """A registered handler of a program's own gets the `Llama` itself, which it may call."""
    return bool(getattr(handler, "__module__", None) == llama_chat_format.__name__)


class ChosenCall(StandIn):
    """Stands for the `Llama` in a chat format whose completion is the arguments of a call.

    Upstream takes every such answer for a whole call (llama_chat_format.py,
    _convert_completion_to_chat_function).
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._ended: str | None = None
        """The end of the completion: "length", say."""

    def create_completion(self, *args: Any, **options: Any) -> Any:
        """See `Llama.create_completion`."""
        return changed(self._llm.create_completion(*args, **options), self._note)

    def _note(self, made: Chunk) -> Chunk:
        self._ended = made["choices"][0]["finish_reason"] or self._ended
        return made

    def told(self, made: Chunk) -> Chunk:
        """Return the chat's completion, or a chunk of it, with the end that the answer had."""
        for choice in made["choices"]:
            if choice["finish_reason"] == "tool_calls" and self._ended not in ("stop", None):
                choice["finish_reason"] = self._ended
        return made


def changed(made: Any, change: Callable[[Chunk], Chunk]) -> Any:
    """Return `change` of a completion, or of each chunk of a stream."""
    return change(made) if isinstance(made, dict) else _each(made, change)


def _each(
    chunks: Generator[Chunk, None, None], change: Callable[[Chunk], Chunk]
) -> Generator[Chunk, None, None]:
    with closing(chunks):
        yield from map(change, chunks)
