"""`/props` and `/slots`: properties of a model, and the state of its slots, in llama-server's form.

Slots as `server_slot::to_json` of tools/server/server-context.cpp, without `params`, and with `state`,
`n_past` and (behind a salt) `tenant`.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

import llama_cpp
from fastapi import APIRouter, Request

from llamahybrid.client.chat_template import template_of
from llamahybrid.core.request import NO_LIMIT
from llamahybrid.core.slot import Slot
from llamahybrid.llama import Llama
from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.server.bodies import CompletionRequest
from llamahybrid.server.errors import later
from llamahybrid.server.keys import Viewer, tag_of
from llamahybrid.server.routes import LLAMA_SERVER, SECURED, InService

SHOW_TEXT = "LLAMA_SERVER_SLOTS_DEBUG"
"""llama-server's environment variable for showing prompts and answers: a number other than 0."""

_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "xtc_probability", "xtc_threshold", "top_n_sigma", "dynatemp_range"),
    *("dynatemp_exponent", "mirostat_tau", "mirostat_eta", "ignore_eos"),
)
"""Options whose defaults `/props` returns."""

router = APIRouter(dependencies=SECURED, tags=[LLAMA_SERVER])


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


@router.get("/slots")
async def slots(
    request: Request, service: InService, fail_on_no_slot: str = "", model: str | None = None
) -> list[dict[str, Any]]:
    """Return the state of each slot of a model; only the use of a slot for other tenants' requests.

    `model`: an alias; None for the open model that was used last. An empty list if it is not open.
    """
    viewer = service.viewer(request)
    alias = None if model is None else service.models.alias(model)
    running = service.admission.running
    told = await service.look(lambda llm: slots_told(llm, viewer, running), alias) or []
    if fail_on_no_slot and all(slot["is_processing"] for slot in told):
        raise later("no slot is available", 1)
    return told


def slots_told(llm: Llama, viewer: Viewer, running: int) -> list[dict[str, Any]]:
    """Return all slots; a model of embeddings has one, in use if any request runs."""
    common = {"n_ctx": llm.n_ctx(), "speculative": bool(llm.draft_model)}
    if not llm.slots.all:
        return [{"id": 0, **common, "is_processing": running > 0, "state": _state(running > 0), "n_past": 0}]
    text = os.environ.get(SHOW_TEXT, "0").strip() not in ("", "0")
    return [
        {"id": number, **common, **_told(llm, slot, viewer, text)}
        for number, slot in enumerate(llm.slots.all)
    ]


def _state(busy: bool) -> str:
    return "processing" if busy else "idle"


def _told(llm: Llama, slot: Slot, viewer: Viewer, text: bool) -> dict[str, Any]:
    request = slot.request
    busy = request is not None
    name, live = slot.glimpse()
    tag = tag_of(name) if request is None else salt_tag(request.salt)
    told: dict[str, Any] = {"is_processing": busy, "state": _state(busy)}
    if not viewer.sees(tag):
        return told
    told["n_past"] = len(live) if viewer.sees(tag_of(name)) else 0
    if tag:
        told["tenant"] = viewer.name(tag)
    progress = None if request is None else request.progress
    reads = text and (not tag or viewer.reads(tag))
    if request is None or progress is None:
        return (
            {**told, "prompt": text_of(llm, live.tolist()), "generated": ""} if reads and not busy else told
        )
    plan, most = progress.plan, request.most
    decoded = max(progress.generated, len(progress.said))
    done = max(plan.cached, progress.reached) if progress.prefilling else plan.total
    told |= {
        "id_task": request.born,
        "n_prompt_tokens": plan.total,
        "n_prompt_tokens_processed": done - plan.cached,
        "n_prompt_tokens_cache": plan.cached,
        "next_token": [
            {
                "has_next_token": not request.over,
                "n_remain": most - decoded if most < NO_LIMIT else -1,
                "n_decoded": decoded,
            }
        ],
    }
    if reads:
        said = live[plan.total if tag_of(name) == tag else len(live) :]
        told |= {"prompt": text_of(llm, progress.prompt.tolist()), "generated": text_of(llm, said.tolist())}
    return told


def text_of(llm: Llama, tokens: list[int]) -> str:
    """Return the text of tokens, control tokens included."""
    known = [token for token in tokens if 0 <= token < llm.n_vocab()]  # others stand for images or audio
    text: bytes = llm._model.detokenize(known, special=True)
    return text.decode("utf-8", errors="replace")
