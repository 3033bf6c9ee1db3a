"""Routes of Anthropic's Messages API, which go the way of this server's chats."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from llamahybrid.llama import Llama
from llamahybrid.server.answer import Chunk, EventAnswer, event
from llamahybrid.server.anthropic.message import Telling
from llamahybrid.server.anthropic.request import CountTokensRequest, MessagesRequest
from llamahybrid.server.errors import ANTHROPIC, Refusal, bad
from llamahybrid.server.job import Create
from llamahybrid.server.prompts import ChatApi, InChatApi
from llamahybrid.server.request_fields import require_known
from llamahybrid.server.routes import SECURED, InService
from llamahybrid.server.service import Service

router = APIRouter(dependencies=SECURED, tags=["Anthropic"])


class MessageAnswer(EventAnswer):
    """A message, or its events as they come."""

    silence = event({"type": "ping"})
    end = b""

    def failed(self, refused: Refusal) -> bytes:
        """See `Answer.failed`."""
        return event(refused.anthropic)

    def beside(self, timings: Chunk) -> Chunk:
        """See `Answer.beside`."""
        return {}


@router.post(ANTHROPIC, summary="Message", response_model=None)
async def create_message(
    request: Request, body: MessagesRequest, service: InService, api: InChatApi
) -> Response:
    """Answer messages, as Anthropic's API does."""
    if (body.model_extra or {}).get("thread") is not None:  # with this code the client sends them all again
        message = "this server holds no conversations: send all messages, and no thread"
        raise bad(message, "thread", "thread_unsupported_request")
    require_known(body, service.settings.ignore_unknown_fields)
    prepare = partial(_prepared, service, api, body)
    return await service.answer(request, body.chat(api.body), prepare, MessageAnswer)


def _prepared(
    service: Service, api: ChatApi, asked: MessagesRequest, llm: Llama, chat: Any, alias: str
) -> tuple[Create, dict[str, Any]]:
    asked.set_thinking(llm, chat)
    create, options = (api.prepare or service.native)(llm, chat, alias)
    return partial(Telling(llm, asked, alias).make, create), options


@router.post(f"{ANTHROPIC}/count_tokens", summary="Tokens of messages", response_model=None)
async def count_tokens(body: CountTokensRequest, service: InService, api: InChatApi) -> Response:
    """Count the tokens of messages without decoding them."""
    require_known(body, service.settings.ignore_unknown_fields)
    chat = body.chat(api.body)

    def count(llm: Llama) -> int:
        body.set_thinking(llm, chat)
        return len(api.prompt(llm, chat).tokens)

    return JSONResponse({"input_tokens": await service.use(body.model, count)})
