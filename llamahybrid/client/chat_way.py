"""ChatWay: the arguments of one `create_chat_completion` that upstream does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from llamahybrid.client.chat_template import chat_with, template_of
from llamahybrid.client.chosen_call import ChosenCall
from llamahybrid.client.continuation import Continuation, Continuing
from llamahybrid.client.extras import asking, current_extras
from llamahybrid.client.model_markers import markers_of
from llamahybrid.client.thought import Thinking


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
    chosen: bool = False
    """The answer is a call of the tool that the chat chose."""

    @property
    def ours(self) -> bool:
        """Upstream's own method does not do it."""
        return bool(self.template) or self.continues or self.chosen

    def create(self, llm: Any) -> Callable[..., Any]:
        """Return the method that makes the completion."""
        if self.continues:
            return lambda messages, *args, **kwargs: self._continued(llm, messages, *args, **kwargs)
        return lambda *args, **kwargs: self._made(llm, *args, **kwargs)

    def _continued(self, llm: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        stand_in = Continuing(llm, continuation_of(llm, messages))
        return self._made(stand_in, messages[:-1], *args, **kwargs)

    def _made(self, llm: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.chosen:
            return chat_with(llm, self.template, *args, **kwargs)
        call = ChosenCall(llm)
        return call.into(chat_with(call, self.template, *args, **kwargs))

    @contextmanager
    def asking(self, llm: Any, options: Mapping[str, Any]) -> Iterator[None]:
        """Completions that are made inside the block think so. Raises ValueError for what cannot be had."""
        budget = None if self.budget is None or self.budget < 0 else self.budget
        think = markers_of(llm).think
        if budget is not None and think is None:
            raise ValueError("thinking_budget: the chat template of this model shows no thinking")
        if think is None or (budget is None and llm.requests.loop is None):
            yield
            return
        continuation = continuation_of(llm, options["messages"]) if self.continues else Continuation("")
        inside = continuation.inside if continuation.said or continuation.thought else None
        thinking = Thinking(think, budget, self.message, inside)
        with asking(replace(current_extras(), thinking=thinking)):
            yield


def continuation_of(llm: Any, messages: Any) -> Continuation:
    """The beginning of the answer that the last message has.

    Raises ValueError where it has none, or the model's chat format is no template.
    """
    if template_of(llm) is None:
        raise ValueError(f"continue_final_message: the chat format {llm.chat_format!r} is no template")
    return Continuation.of(messages, markers_of(llm).think)
