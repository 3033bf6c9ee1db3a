"""llama-server's routes: `/completion`, `/infill`, `/props`, `/tokenize`, `/detokenize` and
`/apply-template`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any

import llama_cpp
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from llamahybrid.client.chat_template import template_of
from llamahybrid.llama import Llama
from llamahybrid.server.answer import EventAnswer
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest, Tokens
from llamahybrid.server.errors import bad
from llamahybrid.server.llama_server.request import InfillRequest, LlamaServerRequest
from llamahybrid.server.llama_server.told import ContentProgress, Telling
from llamahybrid.server.options import MOST_TOKENS, First
from llamahybrid.server.prompts import chat_prompt
from llamahybrid.server.request_fields import require_known
from llamahybrid.server.routes import SECURED, InService
from llamahybrid.server.service import Retell, Service
from llamahybrid.server.settings import in_one_line

router = APIRouter(dependencies=SECURED, tags=["llama-server"])

_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "xtc_probability", "xtc_threshold", "top_n_sigma", "dynatemp_range"),
    *("dynatemp_exponent", "mirostat_tau", "mirostat_eta", "ignore_eos"),
)
"""Options that `/props` tells the defaults of."""


class FormAnswer(EventAnswer):
    """An answer in llama-server's form."""

    end = b""
    timed = False
    progress = ContentProgress


@router.post("/completion", response_model=None)
@router.post("/completions", include_in_schema=False, response_model=None)
async def create_completion(request: Request, body: LlamaServerRequest, service: InService) -> Response:
    """Go on with a prompt."""
    return await _answer(request, body, service)


@router.post("/infill", response_model=None)
async def create_infill(request: Request, body: InfillRequest, service: InService) -> Response:
    """Fill in between a prefix and a suffix."""
    return await _answer(request, body, service)


async def _answer(request: Request, asked: LlamaServerRequest, service: Service) -> Response:
    def prepare(llm: Llama, body: CompletionRequest, alias: str) -> Retell:
        return Telling(llm, asked, body, alias).make

    require_known(asked, service.settings.ignore_unknown_fields)
    return await service.answer(request, asked.completion(), prepare, FormAnswer)


class TokenizeRequest(BaseModel):
    """`/tokenize`."""

    model: str | None = None
    content: str | Annotated[list[str | int], First(), Field(max_length=MOST_TOKENS)] = ""
    add_special: bool = Field(default=False, description="With BOS.")
    parse_special: bool = Field(default=True, description="Control tokens are read as such.")
    with_pieces: bool = Field(default=False, description="The text of each token, too.")


class DetokenizeRequest(BaseModel):
    """`/detokenize`."""

    model: str | None = None
    tokens: Tokens = []


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: InService) -> dict[str, list[Any]]:
    """The tokens of a text, or of texts and tokens in turn."""

    def work(llm: Llama) -> list[Any]:
        made: list[int] = []
        for number, part in enumerate([body.content] if isinstance(body.content, str) else body.content):
            if isinstance(part, int):
                made += require_tokens(llm, [part])
            else:
                bos = body.add_special and number == 0
                made += llm.tokenize(part.encode("utf-8"), add_bos=bos, special=body.parse_special)
        return [{"id": token, "piece": piece(llm, token)} for token in made] if body.with_pieces else made

    return {"tokens": await service.use(body.model, work)}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: InService) -> dict[str, str]:
    """The text of tokens."""

    def work(llm: Llama) -> str:
        text = llm.detokenize(require_tokens(llm, body.tokens), special=True)
        return text.decode("utf-8", errors="replace")

    return {"content": await service.use(body.model, work)}


def require_tokens(llm: Llama, tokens: list[int]) -> list[int]:
    """Return the tokens. Raises Refusal for ids outside the vocabulary."""
    if any(not 0 <= token < llm.n_vocab() for token in tokens):
        raise bad(f"token ids lie in [0, {llm.n_vocab()})", "tokens")
    return tokens


def piece(llm: Llama, token: int) -> str | list[int]:
    """The text of a token; its bytes where they are none."""
    spelt = llm.detokenize([token], special=True)
    try:
        return spelt.decode("utf-8")
    except UnicodeDecodeError:
        return list(spelt)


@router.post("/apply-template")
async def apply_template(body: dict[str, Any], service: InService) -> dict[str, str]:
    """The prompt that a chat makes; nothing is decoded."""
    with in_one_line():
        chat = ChatCompletionRequest.model_validate(body)
    require_known(chat, service.settings.ignore_unknown_fields)
    return {"prompt": await service.use(chat.model, lambda llm: chat_prompt(llm, chat).text)}


@router.get("/props")
async def props(service: InService, model: str | None = None) -> dict[str, Any]:
    """Properties of the model and the server."""
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
