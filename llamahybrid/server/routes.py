"""Routes of requests that are answered in slots, of all APIs; the models, `/health` and `/metrics`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import llama_cpp
from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPBearer

from llamahybrid.server.anthropic.request import MessagesRequest
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest, RequestBody
from llamahybrid.server.errors import later
from llamahybrid.server.llama_server.request import InfillRequest, LlamaServerRequest
from llamahybrid.server.responses.request import ResponseRequest
from llamahybrid.server.service import Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECURED = [Depends(HTTPBearer(auto_error=False))]
"""For /docs: `RequestLimits` asks for keys."""

OPENAI, EXTRAS, ANTHROPIC, LLAMA_SERVER = "OpenAI V1", "Extras", "Anthropic", "llama-server"
"""Tags in /docs."""

router = APIRouter(dependencies=SECURED)


async def service_of(request: Request) -> Service:
    """Return the service of the app that received a request; async: FastAPI runs others in a thread."""
    service: Service = request.app.state.service
    return service


InService = Annotated[Service, Depends(service_of)]


def _add_answers(body: type[RequestBody], tag: str, model: Any = None, *aliases: str) -> None:
    """Add the route of requests that are answered in slots. `model`: of the answer, for /docs."""

    async def answer(request: Request, body: Any, service: InService) -> Response:
        return await service.answer(request, body)

    answer.__annotations__["body"] = body  # FastAPI reads its type here
    stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
    told: dict[int | str, dict[str, Any]] = {200: stream if model is None else {"model": model, **stream}}
    for path in (body.route.value, *aliases):
        router.add_api_route(
            path,
            answer,
            methods=["POST"],
            summary=body.__name__.removesuffix("Request"),
            description=body.__doc__,
            tags=[tag],
            response_model=None,
            responses=told,
            include_in_schema=path not in aliases,
        )


_add_answers(CompletionRequest, OPENAI, llama_cpp.CreateCompletionResponse)
_add_answers(ChatCompletionRequest, OPENAI, llama_cpp.ChatCompletion)
_add_answers(ResponseRequest, OPENAI)
_add_answers(MessagesRequest, ANTHROPIC)
_add_answers(LlamaServerRequest, LLAMA_SERVER, None, "/completions")
_add_answers(InfillRequest, LLAMA_SERVER)


@router.post("/v1/engines/copilot-codex/completions", include_in_schema=False, response_model=None)
async def create_copilot_completion(
    request: Request, body: CompletionRequest, service: InService
) -> Response:
    """Continue a text with the model `copilot-codex`; the default one if none is called so."""
    body.model = "copilot-codex" if "copilot-codex" in service.models else None
    return await service.answer(request, body)


@router.get("/v1/models", summary="Models", tags=[OPENAI], response_model=None)
async def get_models(service: InService) -> dict[str, Any]:
    """Return the models, with `aliases` and `status` as in llama-server's router, and its `created`: now."""
    opened, created = service.models.opened, int(time.time())
    told = {"object": "model", "created": created, "owned_by": "me", "permissions": list[str]()}
    data = [
        {
            **{"id": alias, **told, "aliases": service.models.names(alias)},
            "status": {"value": "loaded" if alias in opened else "unloaded"},
        }
        for alias in service.models
    ]
    return {"object": "list", "data": data}


@router.head("/health", include_in_schema=False)
@router.head("/v1/health", include_in_schema=False)
@router.get("/health", tags=[EXTRAS])
@router.get("/v1/health", include_in_schema=False)
async def health(service: InService) -> dict[str, str]:
    """Return ok, or 503 during shutdown."""
    if service.admission.draining:
        raise later("the server is shutting down", 5)
    return {"status": "ok"}


@router.get("/metrics", tags=[EXTRAS])
def metrics(service: InService) -> Response:
    """Return counters and gauges for Prometheus."""
    return Response(service.metrics.text(), media_type=METRICS_TYPE)
