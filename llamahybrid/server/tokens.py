"""Routes for texts and tokens, which decode nothing: llama_cpp.server's, llama-server's and Anthropic's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from llama_cpp.server.types import (
    DetokenizeInputResponse,
    TokenizeInputCountResponse,
    TokenizeInputRequest,
    TokenizeInputResponse,
)
from pydantic import Field

from llamahybrid.llama import Llama
from llamahybrid.server.anthropic.request import CountTokensRequest
from llamahybrid.server.arguments import chat_prompt
from llamahybrid.server.bodies import MOST_TOKENS, ChatCompletionRequest, First, RequestBody, Tokens
from llamahybrid.server.errors import require_tokens
from llamahybrid.server.prompts import detokenized
from llamahybrid.server.request_fields import Route, require_known
from llamahybrid.server.routes import ANTHROPIC, EXTRAS, LLAMA_SERVER, SECURED, InService
from llamahybrid.server.service import Service

router = APIRouter(dependencies=SECURED)


class TokenizeRequest(RequestBody):
    """`/tokenize`."""

    route: ClassVar = Route.TOKENIZE

    model: str | None = None
    content: str | Annotated[list[str | int], First(), Field(max_length=MOST_TOKENS)] = ""
    add_special: bool = Field(default=False, description="With BOS.")
    parse_special: bool = Field(default=True, description="Control tokens are read as such.")
    with_pieces: bool = Field(default=False, description="The text of each token, too.")


class DetokenizeRequest(RequestBody):
    """`/detokenize`."""

    route: ClassVar = Route.DETOKENIZE

    model: str | None = None
    tokens: Tokens = Field(default=[], description="Token ids.")


class DetokenizeInputRequest(DetokenizeRequest):
    """`/extras/detokenize`."""

    tokens: Tokens = Field(description="Token ids.")


async def _tokens(body: TokenizeInputRequest, service: Service) -> list[int]:
    return await service.use(body.model, lambda llm: llm.tokenize(body.input.encode("utf-8"), special=True))


@router.post("/extras/tokenize", summary="Tokenize", tags=[EXTRAS])
async def tokenize_input(body: TokenizeInputRequest, service: InService) -> TokenizeInputResponse:
    """Return the token ids of a text."""
    return TokenizeInputResponse(tokens=await _tokens(body, service))


@router.post("/extras/tokenize/count", summary="Tokenize Count", tags=[EXTRAS])
async def count_query_tokens(body: TokenizeInputRequest, service: InService) -> TokenizeInputCountResponse:
    """Return the number of token ids of a text."""
    return TokenizeInputCountResponse(count=len(await _tokens(body, service)))


@router.post("/extras/detokenize", summary="Detokenize", tags=[EXTRAS])
async def detokenize_input(body: DetokenizeInputRequest, service: InService) -> DetokenizeInputResponse:
    """Return the text of token ids, without control tokens."""
    return DetokenizeInputResponse(text=await _text(body, service, special=False))


@router.post("/tokenize", tags=[LLAMA_SERVER])
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


@router.post("/detokenize", tags=[LLAMA_SERVER])
async def detokenize(body: DetokenizeRequest, service: InService) -> dict[str, str]:
    """Return the text of tokens."""
    require_known(body, service.settings.ignore_unknown_fields)
    return {"content": await _text(body, service, special=True)}


async def _text(body: DetokenizeRequest, service: Service, special: bool) -> str:
    def work(llm: Llama) -> str:
        require_tokens(llm.n_vocab(), body.tokens, "tokens")
        return str(detokenized(llm, body.tokens, special), "utf-8", errors="replace")

    return await service.use(body.model, work)


def piece(llm: Llama, token: int) -> str | list[int]:
    """Return the text of a token; its bytes if they are no UTF-8."""
    spelt: bytes = llm.detokenize([token], special=True)
    try:
        return spelt.decode("utf-8")
    except UnicodeDecodeError:
        return list(spelt)


@router.post("/apply-template", tags=[LLAMA_SERVER])
async def apply_template(body: dict[str, Any], service: InService) -> dict[str, str]:
    """Return the prompt of a chat, without decoding it."""
    chat = ChatCompletionRequest.model_validate(body)
    service.require(chat)
    return {"prompt": await service.use(chat.model, lambda llm: chat_prompt(llm, chat).text)}


@router.post(Route.COUNT_TOKENS.value, summary="Tokens of messages", tags=[ANTHROPIC])
async def count_tokens(body: CountTokensRequest, service: InService) -> dict[str, int]:
    """Count the tokens of messages without decoding them."""
    require_known(body, service.settings.ignore_unknown_fields)
    chat = body.completion()

    def count(llm: Llama) -> int:
        body.prepare(llm, chat)
        return len(chat_prompt(llm, chat).tokens)

    return {"input_tokens": await service.use(body.model, count)}
