"""Routes of Anthropic's Messages API, which go the way of this server's chats."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from llamahybrid.llama import Llama
from llamahybrid.server.anthropic.request import CountTokensRequest, MessagesRequest
from llamahybrid.server.arguments import chat_prompt
from llamahybrid.server.errors import ANTHROPIC, bad
from llamahybrid.server.request_fields import require_known
from llamahybrid.server.routes import SECURED, InService

router = APIRouter(dependencies=SECURED, tags=["Anthropic"])


@router.post(ANTHROPIC, summary="Message", response_model=None)
async def create_message(request: Request, body: MessagesRequest, service: InService) -> Response:
    """Answer messages, as Anthropic's API does."""
    if (body.model_extra or {}).get("thread") is not None:  # with this code the client sends them all again
        message = "this server holds no conversations: send all messages, and no thread"
        raise bad(message, "thread", "thread_unsupported_request")
    return await service.answer(request, body)


@router.post(f"{ANTHROPIC}/count_tokens", summary="Tokens of messages", response_model=None)
async def count_tokens(body: CountTokensRequest, service: InService) -> Response:
    """Count the tokens of messages without decoding them."""
    require_known(body, service.settings.ignore_unknown_fields)
    chat = body.completion()

    def count(llm: Llama) -> int:
        body.prepare(llm, chat)
        return len(chat_prompt(llm, chat).tokens)

    return JSONResponse({"input_tokens": await service.use(body.model, count)})
