"""The route of OpenAI's Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from llamahybrid.server.responses.request import ResponseRequest
from llamahybrid.server.routes import SECURED, InService

router = APIRouter(dependencies=SECURED)


@router.post("/v1/responses", summary="Response", tags=["OpenAI V1"], response_model=None)
async def create_response(request: Request, body: ResponseRequest, service: InService) -> Response:
    """Answer input items (OpenAI's Responses, stateless)."""
    return await service.answer(request, body)
