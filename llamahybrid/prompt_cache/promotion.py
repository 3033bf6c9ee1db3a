"""From disk, or a server, into RAM, before a prompt is planned: what of it is known better there."""

from __future__ import annotations

import numpy as np

from llamahybrid.prompt_cache.base import Costs, LiveView, Tokens
from llamahybrid.prompt_cache.blocks import Seen
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.prompt_cache.placement import MIN_SPACING
from llamahybrid.prompt_cache.store import RamStore
from llamahybrid.prompt_cache.tier import Tier


def promote(tier: Tier, ram: RamStore, tokens: Tokens, view: LiveView, costs: Costs) -> None:
    """Take the best restore point of a store into RAM, if there is one that is deeper and comes cheaper.

    RAM knows then what the store knows of the prompt's path, too: where to cut depends on it.
    """
    cached = ram.known(tokens, view, costs).cached
    seen = tier.look(view.namespace, tokens, (len(tokens) - cached) * costs.prefill_seconds)
    if seen is None or not seen.length:
        return
    _restore_point(tier, ram, seen, tokens, view, costs)
    known = ram.known(tokens, view, costs)
    if seen.length > known.length or (
        seen.length == known.length and len(seen.followers) > 1 and not known.branches
    ):
        path = tokens[: seen.length].astype(np.int32)
        for longer in [np.append(path, np.int32(token)) for token in seen.followers] or [path]:
            ram.remember(view.namespace, longer, view.state, known.forgets)


def _restore_point(
    tier: Tier, ram: RamStore, seen: Seen, tokens: Tokens, view: LiveView, costs: Costs
) -> None:
    total, live_lcp = len(tokens), common_prefix(tokens, view.tokens)
    anywhere = view.attention_is_all
    limit = total if view.reuse_limit is None else min(total, view.reuse_limit)
    if anywhere:
        limit = min(limit, total - 1)  # no logits lie there
    if view.needs_attention and view.split is None:
        limit = min(limit, live_lcp)  # no other attention can be put back
    while True:
        known = ram.known(tokens, view, costs)
        left_alone = tier.loader.left_alone()
        offer = seen.offer(known.cached, limit, known.missing, anywhere=anywhere, without=left_alone)
        if offer is None:
            return
        saved = (offer.position - known.cached) * costs.prefill_seconds
        few = offer.position - known.cached < min(MIN_SPACING, total - offer.position)
        if few or (saved and tier.costs.seconds(offer.nbytes) > saved):
            return
        path = tokens[: offer.position]
        expected = ram.expect(view.namespace, path, offer.nbytes)
        if expected is None and anywhere:
            limit = offer.attention[-1].start  # a chat's beginning is of use, too
            continue
        if expected is not None:
            failed = tier.counts.late + tier.counts.errors
            loaded = tier.load(view.namespace, tokens, offer, view.split, saved)
            if loaded is not None:
                ram.insert_loaded(view, path, loaded, expected, known.forgets, tier.name)
                return
            if tier.counts.late + tier.counts.errors > failed:  # another look would be as late
                return
            del expected
        limit = offer.position - 1  # never the same again, whatever the store says
