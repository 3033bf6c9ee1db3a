"""Chats: one answer to messages, with the arguments that upstream does not have."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llamahybrid.client.chat_template import chat_with, template_of
from llamahybrid.client.completion import keeps_rows
from llamahybrid.client.continuation import Continuation, Continuing
from llamahybrid.client.extras import asking, current_extras
from llamahybrid.client.json_schema import schema_grammar
from llamahybrid.client.model_markers import markers_of
from llamahybrid.client.stand_in import StandIn
from llamahybrid.client.thought import Thinking

Chunk = dict[str, Any]


@dataclass(frozen=True)
class ChatWay:
    """Variables of the chat template, and how the answer begins and thinks."""

    template: Mapping[str, Any]
    budget: int | None = None
    """Tokens of a thought; None, or less than 0: no bound."""
    message: str = ""
    """Text that a thought ends with where it is ended."""
    continues: bool = False
    """The answer goes on from the last message."""

    def answer(self, llm: Any, **options: Any) -> Any:
        """Return the completion of a chat, or its chunks; `options`: upstream's arguments.

        A chat handler of the program's own has the whole context. Raises ValueError for what cannot be had.
        """
        loop, handler = llm.requests.loop, llm.chat_handler
        begun = continuation_of(llm, options["messages"]) if self.continues else None
        extras = replace(current_extras(), schema=schema_grammar(options))
        thinking = self._thinking(llm, begun)
        model, chosen = llm, None
        if begun is not None:
            model, options["messages"] = Continuing(llm, begun), options["messages"][:-1]
        if loop is not None and handler is None and _chooses_tool(options):
            model = chosen = ChosenCall(model)
            if thinking is not None and thinking.budget is not None:
                thinking = replace(thinking, hidden=True)
                extras = replace(extras, spelt=extras.spelt | markers_of(llm).control)
        if thinking is not None:
            extras = replace(extras, thinking=thinking)
        make = partial(chat_with, model, self.template, **options)
        with asking(extras):
            if loop is None or handler is None or loop.here:
                made = make()
            else:
                made = llm.requests.whole(make, completing=True, rows=keeps_rows(llm, options))
        return made if chosen is None else changed(made, chosen.told)

    def _thinking(self, llm: Any, begun: Continuation | None) -> Thinking | None:
        """The thinking of the answer; None where that of the context stays."""
        budget = None if self.budget is None or self.budget < 0 else self.budget
        think = markers_of(llm).think
        if budget is not None and think is None:
            raise ValueError("thinking_budget: the chat template of this model shows no thinking")
        if think is None or (budget is None and llm.requests.loop is None):
            return None
        inside = begun.inside if begun is not None and (begun.said or begun.thought) else None
        return Thinking(think, budget, self.message, inside)


def continuation_of(llm: Any, messages: Any) -> Continuation:
    """The beginning of the answer that the last message has.

    Raises ValueError where it has none, or the model's chat format is no template.
    """
    if template_of(llm) is None:
        raise ValueError(f"continue_final_message: the chat format {llm.chat_format!r} is no template")
    return Continuation.of(messages, markers_of(llm).think)


# -- an answer that is a call of one tool ----------------------------------------------------------------


def _chooses_tool(options: Mapping[str, Any]) -> bool:
    return isinstance(options.get("tool_choice"), dict) or isinstance(options.get("function_call"), dict)


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
