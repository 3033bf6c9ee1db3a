"""The page at /cache: the contents of each tier, the reuse of the last requests, the state of the slots.

Its script polls JSON and inserts it as text, never as markup. A policy forbids other sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from llamahybrid.llama import Llama
from llamahybrid.prompt_cache.base import CacheStats
from llamahybrid.prompt_cache.nodes import tokens_of
from llamahybrid.prompt_cache.outline import MOST_BRANCHES, Branch, outline
from llamahybrid.prompt_cache.tier import Tier
from llamahybrid.server.keys import Viewer, tag_of
from llamahybrid.server.limits import PAGE
from llamahybrid.server.llama_server.props import slots_told, text_of
from llamahybrid.server.service import Service

MOST_TEXTS = 200
"""Most branches with text."""

FIRST_TOKENS, LAST_TOKENS = 48, 24
"""Displayed tokens of a branch, from its beginning and its end."""

SHAPE_LETTERS = 8
"""Letters of a model's fingerprint: enough to distinguish models."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

router = APIRouter(include_in_schema=False)


@lru_cache
def _file(name: str) -> bytes:
    return (files("llamahybrid.server") / "page" / name).read_bytes()


@router.get(PAGE)
@router.get(f"{PAGE}/cache.js")
@router.get(f"{PAGE}/cache.css")
def page(request: Request) -> Response:
    """Return the page, its script or its style."""
    name = request.url.path.rpartition("/")[2]
    name = name if "." in name else f"{name}.html"
    kind = f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
    return Response(_file(name), headers={**HEADERS, "Content-Type": kind})


@router.get(f"{PAGE}/data")
async def data(
    request: Request,
    text: bool = False,
    most: Annotated[int, Query(ge=1, le=MOST_BRANCHES)] = MOST_BRANCHES,
    model: str | None = None,
) -> Response:
    """Return the contents of the page.

    `text`: with texts that the viewer may read. `most`: branches.

    `model`: an alias; None for the open model that was used last.
    """
    service: Service = request.app.state.service
    viewer = service.viewer(request)
    alias = service.models.alias(model) if model else service.admission.current
    running = service.admission.running
    seen = await service.look(lambda llm: _model(llm, viewer, running, text, most), alias)
    told = {
        "model": alias,
        "models": {each: each in service.models.opened for each in service.models},
        "operator": viewer.operator,
        "text": {"allowed": viewer.operator or bool(viewer.own), "shown": text},
        "waiting": service.admission.waiting,
        "requests": [
            {**past, "tenant": viewer.name(tag)} for tag, past in service.history if viewer.sees(tag)
        ],
        **(seen or {"tiers": {}, "slots": [], "tree": {"branches": [], "more": 0}}),
    }
    return JSONResponse(told, headers=HEADERS)


def _model(llm: Llama, viewer: Viewer, running: int, text: bool, most: int) -> dict[str, Any]:
    """Return tiers, slots and branches of an open model."""
    slots = slots_told(llm, viewer, running)
    cache = llm.prompt_cache
    if cache is None:
        return {"tiers": {}, "slots": slots, "tree": {"branches": [], "more": 0}}
    live = [slot.glimpse() for slot in llm.slots.all]
    most = min(most, MOST_TEXTS) if text else most
    seen = outline(cache, live, lambda name: viewer.sees(tag_of(name)), most)
    stats = cache.stats()
    return {
        "tiers": _tiers(stats, cache.outside),
        "slots": slots,
        "tree": {
            "branches": [_branch(llm, branch, viewer, text) for branch in seen.branches],
            "more": seen.more,
        },
    }


def _tiers(stats: CacheStats, outside: Sequence[Tier]) -> dict[str, Any]:
    extra = stats.extra
    tiers: dict[str, Any] = {"ram": {"bytes": stats.bytes_ram, "budget": extra["budget"]}}
    for tier in outside:
        name, budget = tier.name, tier.limit
        tiers[name] = {"bytes": extra[f"{name}_bytes"], "waiting": extra[f"{name}_waiting"], "budget": budget}
    return tiers


def _branch(llm: Llama, branch: Branch, viewer: Viewer, text: bool) -> dict[str, Any]:
    tag = tag_of(branch.namespace)
    told: dict[str, Any] = {
        "parent": branch.parent,
        "model": branch.namespace[:SHAPE_LETTERS],
        "tenant": viewer.name(tag),
        "start": branch.start,
        "end": branch.end,
        "ram": vars(branch.ram),
        "disk": vars(branch.disk),
        "slots": branch.slots,
        "next": branch.goes_next,
        "idle": branch.idle,
        "more": branch.more,
    }
    if text and viewer.reads(tag):
        told["text"] = spell(llm, branch)
    return told


def spell(llm: Llama, branch: Branch) -> str:
    """Return the beginning and the end of a branch's text."""
    tokens = tokens_of(branch.ids).tolist()
    if len(tokens) <= FIRST_TOKENS + LAST_TOKENS:
        return text_of(llm, tokens)
    return f"{text_of(llm, tokens[:FIRST_TOKENS])} … {text_of(llm, tokens[-LAST_TOKENS:])}"
