"""langchain-community: `LlamaCpp`, `ChatLlamaCpp`, streamed, with tools, and their counts of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, reuses, stock_and_ours

needed("langchain_community", "langchain")

from langchain_community.chat_models import ChatLlamaCpp  # noqa: E402
from langchain_community.llms import LlamaCpp  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402

OPTIONS: dict[str, Any] = {
    "n_ctx": 2048,
    "n_batch": 512,
    "max_tokens": 12,
    "temperature": 0.0,
    "verbose": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "river",
        "description": "Looks up a river.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"enum": ["Mur", "Inn"]}},
            "required": ["name"],
        },
    },
}
CHOICE = {"type": "function", "function": {"name": "river"}}


@pytest.fixture
def path(tiny_model: TinyModel) -> str:
    return str(tiny_model("qwen35"))


def chat_model(path: str, **options: Any) -> Any:
    kwargs = {**SETTINGS, "chat_format": "chatml"}
    return ChatLlamaCpp(model_path=path, model_kwargs=kwargs, **{**OPTIONS, **options})


def conversation(model: Any, ask: Any) -> list[str]:
    """Three questions; then the first one is edited."""
    said, messages = [], [SystemMessage(SYSTEM)]
    for question in (*ASKED, "Which lakes?"):
        if question == "Which lakes?":
            messages = messages[:1]
        messages.append(HumanMessage(question))
        said.append(ask(model, messages))
        messages.append(AIMessage(said[-1]))
    return said


def streamed(model: Any, messages: Any) -> str:
    return "".join(chunk.content for chunk in model.stream(messages))


def test_completions(path: str) -> None:
    def scenario() -> Any:
        model = LlamaCpp(model_path=path, model_kwargs=SETTINGS, **OPTIONS)
        said = [model.invoke(SYSTEM + question) for question in (*ASKED, *ASKED)]
        return [*said, "".join(model.stream(SYSTEM + ASKED[0]))], model.client

    reuses(scenario)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("ask", [streamed, lambda model, messages: model.invoke(messages).content])
def test_chats(path: str, ask: Any, streaming: bool) -> None:
    def scenario() -> Any:
        model = chat_model(path, streaming=streaming)
        return conversation(model, ask), model.client

    reuses(scenario)


def test_usage_counts_cached_tokens(path: str) -> None:
    """langchain-community passes `usage` on as it is; it makes no `usage_metadata` of it, nor of a stream."""
    told = []

    def scenario() -> Any:
        model = chat_model(path, streaming=False)
        answers = [model.invoke([SystemMessage(SYSTEM), HumanMessage(q)]) for q in (ASKED[0], *ASKED)]
        told.append([answer.response_metadata["token_usage"] for answer in answers])
        return [answer.content for answer in answers], model.client

    reuses(scenario)
    stock, ours = told
    details = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in ours]
    assert all(usage.pop("completion_tokens_details").keys() == {"reasoning_tokens"} for usage in ours)
    assert ours == stock
    assert details[0] == 0
    assert details[1] == ours[1]["prompt_tokens"]
    assert all(cached > len(SYSTEM) for cached in details[1:])


def test_tools(path: str) -> None:
    def scenario() -> Any:
        model = chat_model(path, max_tokens=300, streaming=False).bind_tools([TOOL], tool_choice=CHOICE)
        messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(ASKED[0])]
        calls = []
        for _ in range(3):
            answer = model.invoke(messages)
            calls += [(call["name"], call["args"]) for call in answer.tool_calls]
            messages += [answer, ToolMessage("It is long.", tool_call_id=answer.tool_calls[0]["id"])]
        assert {name for name, _ in calls} == {"river"}
        assert all(arguments["name"] in ("Mur", "Inn") for _, arguments in calls)
        return calls, model.bound.client

    stock, ours = stock_and_ours(scenario)
    assert ours.said == stock.said
    assert ours.decoded <= stock.decoded
