"""The state of each slot, in llama-server's form, as a viewer may see it.

As `server_slot::to_json` of tools/server/server-context.cpp, without `params`, and with `state`, `n_past` and
(behind a salt) `tenant`.
"""

from __future__ import annotations

import os
from typing import Any

from llamahybrid.core.request import NO_LIMIT
from llamahybrid.core.slot import Slot
from llamahybrid.llama import Llama
from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.server.keys import Viewer, tag_of

SHOW_TEXT = "LLAMA_SERVER_SLOTS_DEBUG"
"""llama-server's environment variable for showing prompts and answers: a number other than 0."""


def slots_told(llm: Llama, viewer: Viewer, running: int) -> list[dict[str, Any]]:
    """Return all slots; a model of embeddings has one, in use if any request runs."""
    common = {"n_ctx": llm.n_ctx(), "speculative": bool(llm.draft_model)}
    if not llm.slots.all:
        return [{"id": 0, **common, "is_processing": running > 0, "state": _state(running > 0)}]
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
