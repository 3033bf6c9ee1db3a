"""Fields of requests for thinking budgets and continued messages."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

from llamahybrid.client.chat_template import template_of, unread
from llamahybrid.client.chat_way import continuation_of
from llamahybrid.client.markers import markers_of
from llamahybrid.client.thought import Thinking
from llamahybrid.llama import Llama
from llamahybrid.server.errors import bad

Budget: TypeAlias = Annotated[int, Field(ge=-1, le=1 << 30)]

BUDGETS = (
    *("thinking_budget", "thinking_budget_tokens", "thinking_token_budget"),
    *("reasoning_budget", "reasoning_budget_tokens"),
)
"""Names of the same field."""


class ThinkingOptions(BaseModel):
    """The thinking budget, by the names of llama-server, vLLM and others."""

    thinking_budget: Budget | None = Field(
        default=None, description="Tokens of a thought, which is ended then; 0: at once, -1: no bound."
    )
    thinking_budget_tokens: Budget | None = Field(default=None, description="The same (llama-server).")
    reasoning_budget: Budget | None = Field(default=None, description="The same.")
    reasoning_budget_tokens: Budget | None = Field(default=None, description="The same (llama-server).")
    thinking_token_budget: Budget | None = Field(default=None, description="The same (vLLM).")
    reasoning_budget_message: str = Field(
        default="",
        max_length=1000,
        description="Text that a thought ends with where it is ended (llama-server).",
    )

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name) is not None}
        if len(set(given.values())) > 1:
            raise ValueError(f"{' and '.join(given)} are the same field; give one")
        return self

    @property
    def budget(self) -> int | None:
        """Tokens of a thought; None: no bound."""
        found = next((each for name in BUDGETS if (each := getattr(self, name)) is not None), None)
        return None if found == -1 else found


class ContinuationOptions(BaseModel):
    """The choice between a new answer and one that continues the assistant's last message."""

    continue_final_message: bool | None = Field(
        default=None, description="null: where there is one, as llama-server; false: a new answer, as vLLM."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="The opposite of continue_final_message, which vLLM asks for, too."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        goes_on, new = self.continue_final_message, self.add_generation_prompt
        if goes_on and new:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        if new is False and goes_on is False:
            raise ValueError(
                "add_generation_prompt: an answer is a new one, or goes on from the last message"
            )
        return self


def goes_on(llm: Llama, body: Any) -> bool:
    """Return True if the answer to a chat continues its last message.

    By default it does, as with llama-server, if that message is the assistant's, has text and calls no tool.
    Raises Refusal if the request asks for a continuation of nothing.
    """
    asked = body.continue_final_message
    if asked is None and body.add_generation_prompt is None:
        last = body.messages[-1]
        text = last.get("content") or last.get("reasoning_content")
        over = last.get("tool_calls") or last.get("function_call")
        return last["role"] == "assistant" and bool(text) and not over and template_of(llm) is not None
    if not (asked or body.add_generation_prompt is False):
        return False
    try:
        continuation_of(llm, body.messages)
    except ValueError as error:
        raise bad(str(error), "continue_final_message" if asked else "add_generation_prompt") from None
    return True


def thinking_of(llm: Llama, body: Any) -> Thinking | None:
    """Return the thinking options of a body; None without a budget.

    Raises Refusal for a budget if the chat template has no markers of thinking.
    """
    if body.budget is None:
        return None
    think = markers_of(llm).think
    if think is None:
        name = next(name for name in BUDGETS if getattr(body, name) is not None)
        raise bad("the chat template of this model shows no thinking that could be ended", name)
    return Thinking(think, body.budget, body.reasoning_budget_message)


def closes_thought(llm: Llama, name: str, value: Any) -> bool:
    """Return True for a variable that turns thinking off if the template has markers, but no switch."""
    off = {"enable_thinking": False, "reasoning_effort": "none"}
    asked = name in off and type(value) is type(off[name]) and value == off[name]
    return asked and len(unread(llm, (*off,))) == len(off) and markers_of(llm).think is not None


def budget_of(llm: Llama, body: Any) -> int | None:
    """Return the thinking budget of a chat; 0 if thinking is off and the template has no switch.

    Raises Refusal as `thinking_of`.
    """
    if any(
        closes_thought(llm, name, getattr(body, name)) for name in ("enable_thinking", "reasoning_effort")
    ):
        return 0
    return None if (thinking := thinking_of(llm, body)) is None else thinking.budget
