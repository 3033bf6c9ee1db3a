"""Prompts: the chat API of this server, and the prompts of its chats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from llamahybrid.llama import Llama
from llamahybrid.server.arguments import arguments
from llamahybrid.server.bodies import ChatCompletionRequest
from llamahybrid.server.options import template_kwargs
from llamahybrid.server.prefill import goes_on, prefilled
from llamahybrid.server.rendering import Prompt, rendered
from llamahybrid.server.service import Prepare


@dataclass(frozen=True)
class ChatApi:
    """The chat API that this server serves."""

    body: type[Any]
    """Type of `/v1/chat/completions`."""
    prepare: Prepare | None
    """See `Service.answer`."""
    prompt: Callable[[Llama, Any], Prompt]
    """The prompt of a body. Raises ValueError where the model takes no such chat."""


def chat_prompt(llm: Llama, body: ChatCompletionRequest) -> Prompt:
    """The prompt of a chat of llama_cpp.server's API. Raises Refusal as `rendered`."""
    options = arguments(llm, body, "")
    del options["n"]
    make = prefilled if goes_on(llm, body) else rendered
    return make(llm, template_kwargs(llm, body), **options)


LLAMA_CPP = ChatApi(ChatCompletionRequest, None, chat_prompt)
"""llama_cpp.server's."""


def chat_api_of(request: Request) -> ChatApi:
    """The API of the app that got a request."""
    api: ChatApi = request.app.state.chat_api
    return api


InChatApi = Annotated[ChatApi, Depends(chat_api_of)]
