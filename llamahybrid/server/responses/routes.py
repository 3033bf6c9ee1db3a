"""The route of OpenAI's Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from llamahybrid.llama import Llama
from llamahybrid.server.bodies import ChatCompletionRequest
from llamahybrid.server.request_fields import require_known
from llamahybrid.server.responses.output import Telling
from llamahybrid.server.responses.request import ResponseRequest
from llamahybrid.server.routes import SECURED, InService
from llamahybrid.server.service import Retell

router = APIRouter(dependencies=SECURED)


@router.post("/v1/responses", summary="Response", tags=["OpenAI V1"], response_model=None)
async def create_response(request: Request, body: ResponseRequest, service: InService) -> Response:
    """Answer input items (OpenAI's Responses, stateless)."""

    def retell(llm: Llama, chat: ChatCompletionRequest, alias: str) -> Retell:
        body.prepare(llm, chat)
        return Telling(llm, body, alias).make

    require_known(body, service.settings.ignore_unknown_fields)
    return await service.answer(request, body.chat(), retell)
