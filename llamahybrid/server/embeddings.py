"""Embeddings, by OpenAI's route and by llama-server's."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request
from llama_cpp.server import types as upstream
from pydantic import Field
from starlette.responses import JSONResponse

from llamahybrid.client.handle import RequestHandle
from llamahybrid.errors import RequestCancelled
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import Prompts, RequestBody, several
from llamahybrid.server.errors import bad, require_tokens
from llamahybrid.server.prompts import TokenText
from llamahybrid.server.request_fields import Route, require_known
from llamahybrid.server.routes import LLAMA_SERVER, OPENAI, SECURED, InService
from llamahybrid.server.service import Service

router = APIRouter(dependencies=SECURED)


class EmbeddingRequest(upstream.CreateEmbeddingRequest, RequestBody):  # type: ignore[misc]
    """`/v1/embeddings`."""

    route: ClassVar = Route.EMBEDDINGS

    input: Prompts = Field(description="What to embed: a text, its token ids, or several of either.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, description="Not supported: the model's own.")


class LlamaServerEmbeddingRequest(EmbeddingRequest):
    """`/embedding`, also named `/embeddings`."""

    encoding_format: Literal["float"] = "float"
    embd_normalize: int = Field(
        default=2,
        ge=-1,
        le=100,
        description="Norm of pooled vectors. -1: none, 0: largest absolute value, 1: taxicab, 2: Euclidean; "
        "more: p-norm.",
    )

    @classmethod
    def received(cls, said: dict[str, Any]) -> dict[str, Any]:
        """Take `content` as another name of `input`, which has priority."""
        content = said.pop("content", None)
        return said if content is None else {"input": content, **said}


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


@router.post("/v1/embeddings", summary="Embedding", tags=[OPENAI], response_model=None)
async def create_embedding(request: Request, body: EmbeddingRequest, service: InService) -> JSONResponse:
    """Embed texts, in parallel to chats. The model needs the setting `embedding`."""
    made = await _embed(request, body, service)
    if body.encoding_format == "base64":
        for each in made["data"]:
            each["embedding"] = packed(each["embedding"])
    return JSONResponse({**made, "model": service.models.alias(body.model)})


@router.post("/embedding", tags=[LLAMA_SERVER])
@router.post("/embeddings", include_in_schema=False)
async def create_llama_server_embedding(
    request: Request, body: LlamaServerEmbeddingRequest, service: InService
) -> list[dict[str, Any]]:
    """Embed texts; without pooling the vectors of all tokens, as the model gives them."""
    made = await _embed(request, body, service)
    return [
        {"index": each["index"], "embedding": vectors_of(each["embedding"], body.embd_normalize)}
        for each in made["data"]
    ]


async def _embed(request: Request, body: EmbeddingRequest, service: Service) -> dict[str, Any]:
    """Return the answer of upstream's `create_embedding`. Raises Refusal."""

    def work(llm: Llama) -> Any:
        if not llm.embeds:
            raise bad("this model was not opened for embeddings (embedding: true)", "model")
        for ids in given:
            require_tokens(llm.n_vocab(), () if isinstance(ids, str) else ids, "input")
        texts = [each if isinstance(each, str) else TokenText(each) for each in given]
        handle = llm.requests.handle()
        assert handle is not None, "a job's requests have one"
        return llm.create_embedding(input=WantedTexts(texts, handle))

    require_known(body, service.settings.ignore_unknown_fields)
    if body.dimensions is not None:
        raise bad("embeddings have the dimensions that the model gives them", "dimensions")
    given = several(body.input)
    if not all(given):
        raise bad("there is nothing to embed", "input")
    slots = service.slots_to_embed(body.model)
    return await service.use_slot(request, body.model, work, slots=slots)


def packed(embedding: list[Any]) -> str | list[Any]:
    """Return an embedding in base64, little-endian float32; those of single tokens stay lists."""
    if embedding and isinstance(embedding[0], list):
        return embedding
    return b64encode(np.asarray(embedding, "<f4").tobytes()).decode()


def vectors_of(embedding: list[Any], norm: int) -> list[Any]:
    """Return the vectors of a text as llama-server (common.cpp, common_embd_normalize)."""
    if embedding and isinstance(embedding[0], list):
        return embedding
    if norm < 0:
        return [embedding]
    vector = np.asarray(embedding, np.float64)
    size = np.abs(vector).max() / 32760 if norm == 0 else np.linalg.norm(vector, norm)
    return [(vector / size if size else 0 * vector).tolist()]
