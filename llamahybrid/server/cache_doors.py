"""Routes for the cache: decode a prompt ahead of time, pin it, forget it.

Each takes a chat (`messages`, `tools`, ...) or a `prompt`, as the routes for answers.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.server.arguments import chat_prompt
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest
from llamahybrid.server.errors import Refusal, bad, require_tokens
from llamahybrid.server.limits import PAGE
from llamahybrid.server.prompts import PromptRules, prompt_rules
from llamahybrid.server.routes import SECURED, InService
from llamahybrid.server.service import Service

router = APIRouter(dependencies=SECURED, tags=["Cache"])


@router.post(f"{PAGE}/warm")
async def warm(request: Request, body: dict[str, Any], service: InService) -> dict[str, Any]:
    """Decode a prompt, so that later requests with this beginning resume behind it."""
    asked = _read(body, service)

    def work(llm: Llama) -> dict[str, Any]:
        prompt = _tokens(llm, asked)
        prompt_rules.set(PromptRules(service.settings.max_prompt_tokens))
        report = llm.warm(prompt)
        return {
            "model": service.models.alias(asked.model),
            "prompt_tokens": report.total,
            "cached_tokens": report.cached,
            "decoded_tokens": report.decoded,
            "seconds": round(report.prefill_seconds, 3),
        }

    return await service.use_slot(request, asked.model, work, service.salt(request, asked.cache_salt))


@router.post(f"{PAGE}/pin")
async def pin(request: Request, body: dict[str, Any], service: InService) -> dict[str, Any]:
    """Exempt a prompt's state from eviction; `pinned` false ends the exemption."""
    _require_operator(request, service)
    pinned = body.pop("pinned", True)
    if not isinstance(pinned, bool):
        raise bad("pinned is true or false", "pinned")
    asked = _read(body, service)

    def work(llm: Llama) -> dict[str, Any]:
        cache, tokens = _cache_of(llm), _tokens(llm, asked)
        told = {"model": service.models.alias(asked.model), "tokens": len(tokens), "pinned": pinned}
        if not pinned:
            cache.unpin(tokens)
            return told
        return {**told, "checkpoints": cache.pin(tokens)}

    return await service.use(asked.model, work)


@router.post(f"{PAGE}/forget")
async def forget(request: Request, body: dict[str, Any], service: InService) -> dict[str, Any]:
    """Delete a prompt and its continuations, of every salt, from RAM, disk and slots; or `all`."""
    _require_operator(request, service)
    everything = body.pop("all", False)
    if not isinstance(everything, bool):
        raise bad("all is true or false", "all")
    if everything and body.keys() - {"model"}:
        raise bad("all goes with no prompt", "all")
    asked = CompletionRequest(model=body.get("model")) if everything else _read(body, service)

    def work(llm: Llama) -> dict[str, Any]:
        cache = _cache_of(llm)
        before = cache.stats().bytes_ram
        if everything:
            cache.clear()
        freed = before - cache.stats().bytes_ram if everything else cache.forget(_tokens(llm, asked))
        return {"model": service.models.alias(asked.model), "freed_bytes": max(0, freed)}

    return await service.use(asked.model, work)


def _read(body: dict[str, Any], service: Service) -> Any:
    """Return a body as a chat or a completion. Raises ValueError, Refusal."""
    chat = "messages" in body
    if chat == ("prompt" in body):
        raise bad("give messages, or a prompt", "prompt")
    asked: Any = (ChatCompletionRequest if chat else CompletionRequest).model_validate(body)
    service.require(asked)
    if not chat and (len(asked.prompts()) > 1 or not asked.prompts()[0]):
        raise bad("one prompt at a time, and not an empty one", "prompt")
    return asked


def _tokens(llm: Llama, asked: Any) -> list[int]:
    """Return the token ids of a prompt, as the route for answers has them."""
    if not isinstance(asked, CompletionRequest):
        return chat_prompt(llm, asked).tokens
    prompt = asked.prompts()[0]
    if isinstance(prompt, str):
        return list(llm.tokenize(prompt.encode("utf-8"), add_bos=asked.add_special_tokens, special=True))
    require_tokens(llm.n_vocab(), prompt, "prompt")
    return prompt


def _cache_of(llm: Llama) -> PromptCache:
    if llm.prompt_cache is None:
        raise bad("this model was opened without a prompt cache", "model")
    return llm.prompt_cache


def _require_operator(request: Request, service: Service) -> None:
    """Raise Refusal for other users."""
    if not service.viewer(request).operator:
        message = "this is for the operator: the holder of operator_key, or of the only API key; open_page"
        raise Refusal(403, f"{message} lets anybody in where there are no keys", "permission_error")
