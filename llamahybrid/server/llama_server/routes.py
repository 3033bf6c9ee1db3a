"""llama-server's routes: `/completion`, `/infill`, `/embedding`, `/props`, `/tokenize`, `/detokenize` and
`/apply-template`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Literal

import llama_cpp
import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from llamahybrid.client.chat_template import template_of
from llamahybrid.llama import Llama
from llamahybrid.server.arguments import chat_prompt
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from llamahybrid.server.errors import require_tokens
from llamahybrid.server.llama_server.request import (
    DetokenizeRequest,
    InfillRequest,
    LlamaServerRequest,
    TokenizeRequest,
)
from llamahybrid.server.prompts import detokenized
from llamahybrid.server.request_fields import require_known
from llamahybrid.server.routes import SECURED, InService, embed

router = APIRouter(dependencies=SECURED, tags=["llama-server"])

_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "xtc_probability", "xtc_threshold", "top_n_sigma", "dynatemp_range"),
    *("dynatemp_exponent", "mirostat_tau", "mirostat_eta", "ignore_eos"),
)
"""Options whose defaults `/props` returns."""


@router.post("/completion", response_model=None)
@router.post("/completions", include_in_schema=False, response_model=None)
async def create_completion(request: Request, body: LlamaServerRequest, service: InService) -> Response:
    """Continue a prompt."""
    return await service.answer(request, body)


@router.post("/infill", response_model=None)
async def create_infill(request: Request, body: InfillRequest, service: InService) -> Response:
    """Fill in between a prefix and a suffix."""
    return await service.answer(request, body)


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


@router.post("/embedding")
@router.post("/embeddings", include_in_schema=False)
async def create_embedding(
    request: Request, body: LlamaServerEmbeddingRequest, service: InService
) -> list[dict[str, Any]]:
    """Embed texts; without pooling the vectors of all tokens, as the model gives them."""
    made = await embed(request, body, service)
    return [
        {"index": each["index"], "embedding": vectors_of(each["embedding"], body.embd_normalize)}
        for each in made["data"]
    ]


def vectors_of(embedding: list[Any], norm: int) -> list[Any]:
    """Return the vectors of a text as llama-server (common.cpp, common_embd_normalize)."""
    if norm < 0 or (embedding and isinstance(embedding[0], list)):
        return embedding if embedding and isinstance(embedding[0], list) else [embedding]
    vector = np.asarray(embedding, np.float64)
    size = np.abs(vector).max() / 32760 if norm == 0 else np.linalg.norm(vector, norm)
    return [(vector / size if size else 0 * vector).tolist()]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: InService) -> dict[str, list[Any]]:
    """Return the tokens of a text, or of a list of texts and tokens."""

    def work(llm: Llama) -> list[Any]:
        made: list[int] = []
        for number, part in enumerate([body.content] if isinstance(body.content, str) else body.content):
            if isinstance(part, int):
                require_tokens(llm.n_vocab(), [part], "tokens")
                made.append(part)
            else:
                bos = body.add_special and number == 0
                made += llm.tokenize(part.encode("utf-8"), add_bos=bos, special=body.parse_special)
        if not body.with_pieces:
            return made
        pieces = {token: piece(llm, token) for token in set(made)}
        return [{"id": token, "piece": pieces[token]} for token in made]

    require_known(body, service.settings.ignore_unknown_fields)
    return {"tokens": await service.use(body.model, work)}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: InService) -> dict[str, str]:
    """Return the text of tokens."""

    def work(llm: Llama) -> str:
        require_tokens(llm.n_vocab(), body.tokens, "tokens")
        return str(detokenized(llm, body.tokens, special=True), "utf-8", errors="replace")

    require_known(body, service.settings.ignore_unknown_fields)
    return {"content": await service.use(body.model, work)}


def piece(llm: Llama, token: int) -> str | list[int]:
    """Return the text of a token; its bytes if they are no UTF-8."""
    spelt: bytes = llm.detokenize([token], special=True)
    try:
        return spelt.decode("utf-8")
    except UnicodeDecodeError:
        return list(spelt)


@router.post("/apply-template")
async def apply_template(body: dict[str, Any], service: InService) -> dict[str, str]:
    """Return the prompt of a chat, without decoding it."""
    chat = ChatCompletionRequest.model_validate(body)
    service.require(chat)
    return {"prompt": await service.use(chat.model, lambda llm: chat_prompt(llm, chat).text)}


@router.get("/props")
async def props(service: InService, model: str | None = None) -> dict[str, Any]:
    """Return properties of the model and the server."""
    alias = service.models.alias(model)

    def work(llm: Llama) -> dict[str, Any]:
        body = CompletionRequest().model_dump()
        params = {"n_predict": -1, "repeat_penalty": 1.0, **{name: body[name] for name in _DEFAULTS}}
        return {
            "default_generation_settings": {"n_ctx": llm.n_ctx(), "params": params},
            "total_slots": max(1, len(llm.slots)),
            "model_alias": alias,
            "model_path": PurePath(llm.model_path).name,  # no path of this machine
            "chat_template": template_of(llm) or "",
            "bos_token": _spelt(llm, llm.token_bos()),
            "eos_token": _spelt(llm, llm.token_eos()),
            "modalities": {"vision": llm.chat_handler is not None, "audio": False},
            "build_info": f"llama-cpp-python {llama_cpp.__version__}",
            "is_sleeping": False,
        }

    return await service.use(alias, work)


def _spelt(llm: Llama, token: int) -> str:
    return llm.detokenize([token], special=True).decode("utf-8", "replace") if token >= 0 else ""
