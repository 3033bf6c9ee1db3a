"""llama_cpp.server's routes, with its types, and llama-server's `/health` and `/metrics`."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import llama_cpp
import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPBearer
from llama_cpp.server.types import (
    DetokenizeInputResponse,
    TokenizeInputCountResponse,
    TokenizeInputRequest,
    TokenizeInputResponse,
)

from llamahybrid.client.handle import RequestHandle
from llamahybrid.errors import RequestCancelled
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
)
from llamahybrid.server.errors import bad, later, require_tokens
from llamahybrid.server.prompts import TokenText, detokenized
from llamahybrid.server.request_fields import require_known
from llamahybrid.server.service import Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECURED = [Depends(HTTPBearer(auto_error=False))]
"""For /docs: `RequestLimits` asks for keys."""

router = APIRouter(dependencies=SECURED)


async def service_of(request: Request) -> Service:
    """Return the service of the app that received a request; async: FastAPI runs others in a thread."""
    service: Service = request.app.state.service
    return service


InService = Annotated[Service, Depends(service_of)]

_OPENAI, _EXTRAS = "OpenAI V1", "Extras"


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    """Return the entry of /docs for an answer that is a completion or a stream."""
    return {200: {"model": model, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.post(
    "/v1/completions",
    summary="Completion",
    tags=[_OPENAI],
    response_model=None,
    responses=_answers(llama_cpp.CreateCompletionResponse),
)
async def create_completion(request: Request, body: CompletionRequest, service: InService) -> Response:
    """Continue a text."""
    return await service.answer(request, body)


@router.post("/v1/engines/copilot-codex/completions", include_in_schema=False, response_model=None)
async def create_copilot_completion(
    request: Request, body: CompletionRequest, service: InService
) -> Response:
    """Continue a text with the model `copilot-codex`; the default one if none is called so."""
    body.model = "copilot-codex" if "copilot-codex" in service.models else None
    return await service.answer(request, body)


@router.post(
    "/v1/chat/completions",
    summary="Chat",
    tags=[_OPENAI],
    response_model=None,
    responses=_answers(llama_cpp.ChatCompletion),
)
async def create_chat_completion(
    request: Request, body: ChatCompletionRequest, service: InService
) -> Response:
    """Answer messages."""
    return await service.answer(request, body)


@router.post("/v1/embeddings", summary="Embedding", tags=[_OPENAI], response_model=None)
async def create_embedding(request: Request, body: EmbeddingRequest, service: InService) -> Response:
    """Embed texts, in parallel to chats. The model needs the setting `embedding`."""
    made = await embed(request, body, service)
    if body.encoding_format == "base64":
        for each in made["data"]:
            each["embedding"] = packed(each["embedding"])
    made["model"] = service.models.alias(body.model)
    return Response(json.dumps(made), media_type="application/json")


async def embed(request: Request, body: EmbeddingRequest, service: Service) -> dict[str, Any]:
    """Return the answer of upstream's `create_embedding`. Raises Refusal."""

    def work(llm: Llama) -> Any:
        if not llm.embeds:
            raise bad("this model was not opened for embeddings (embedding: true)", "model")
        for ids in body.texts():
            require_tokens(llm.n_vocab(), () if isinstance(ids, str) else ids, "input")
        texts = [each if isinstance(each, str) else TokenText(each) for each in body.texts()]
        handle = llm.requests.handle()
        assert handle is not None, "a job's requests have one"
        return llm.create_embedding(input=WantedTexts(texts, handle))

    require_known(body, service.settings.ignore_unknown_fields)
    body.require_understood()
    slots = service.slots_to_embed(body.model)
    made: dict[str, Any] = await service.use_slot(request, body.model, work, slots=slots)
    return made


class WantedTexts(list[str]):
    """Texts to embed, until the client disconnects: upstream takes them batch by batch."""

    def __init__(self, texts: Iterable[str], handle: RequestHandle) -> None:
        super().__init__(texts)
        self._handle = handle

    def __iter__(self) -> Iterator[str]:
        """Raises RequestCancelled for a cancelled handle."""
        for text in super().__iter__():
            if self._handle.cancelled:
                raise RequestCancelled("the client of these embeddings disconnected")
            yield text


def packed(embedding: list[Any]) -> str | list[Any]:
    """Return an embedding in base64, little-endian float32; those of single tokens stay lists."""
    if embedding and isinstance(embedding[0], list):
        return embedding
    return b64encode(np.asarray(embedding, "<f4").tobytes()).decode()


@router.get("/v1/models", summary="Models", tags=[_OPENAI], response_model=None)
async def get_models(service: InService) -> dict[str, Any]:
    """Return the models, with `aliases` and `status` as in llama-server's router."""
    opened, told = service.models.opened, {"object": "model", "owned_by": "me", "permissions": list[str]()}
    data = [
        {
            **{"id": alias, **told, "aliases": service.models.names(alias)},
            "status": {"value": "loaded" if alias in opened else "unloaded"},
        }
        for alias in service.models
    ]
    return {"object": "list", "data": data}


def _tokens(text: str) -> Any:
    return lambda llm: llm.tokenize(text.encode("utf-8"), special=True)


@router.post("/extras/tokenize", summary="Tokenize", tags=[_EXTRAS])
async def tokenize(body: TokenizeInputRequest, service: InService) -> TokenizeInputResponse:
    """Return the token ids of a text."""
    return TokenizeInputResponse(tokens=await service.use(body.model, _tokens(body.input)))


@router.post("/extras/tokenize/count", summary="Tokenize Count", tags=[_EXTRAS])
async def count_query_tokens(body: TokenizeInputRequest, service: InService) -> TokenizeInputCountResponse:
    """Return the number of token ids of a text."""
    return TokenizeInputCountResponse(count=len(await service.use(body.model, _tokens(body.input))))


@router.post("/extras/detokenize", summary="Detokenize", tags=[_EXTRAS])
async def detokenize(body: DetokenizeRequest, service: InService) -> DetokenizeInputResponse:
    """Return the text of token ids."""

    def work(llm: Llama) -> str:
        require_tokens(llm.n_vocab(), body.tokens, "tokens")
        return str(detokenized(llm, body.tokens), "utf-8", errors="replace")

    return DetokenizeInputResponse(text=await service.use(body.model, work))


@router.head("/health", include_in_schema=False)
@router.head("/v1/health", include_in_schema=False)
@router.get("/health", tags=[_EXTRAS])
@router.get("/v1/health", include_in_schema=False)
async def health(service: InService) -> dict[str, str]:
    """Return ok, or 503 during shutdown."""
    if service.admission.draining:
        raise later("the server is shutting down", 5)
    return {"status": "ok"}


@router.get("/metrics", tags=[_EXTRAS])
def metrics(service: InService) -> Response:
    """Return counters and gauges for Prometheus."""
    return Response(service.metrics.text(), media_type=METRICS_TYPE)
