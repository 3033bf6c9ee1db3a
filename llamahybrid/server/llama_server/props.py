"""`/props` and `/slots`: properties of a model, and the state of its slots, in llama-server's form."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import llama_cpp
from fastapi import APIRouter, Request

from llamahybrid.client.chat_template import template_of
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import CompletionRequest
from llamahybrid.server.errors import later
from llamahybrid.server.routes import LLAMA_SERVER, SECURED, InService
from llamahybrid.server.slots import slots_told

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
