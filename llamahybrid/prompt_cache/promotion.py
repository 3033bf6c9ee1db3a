"""From disk, or a server, into RAM, before a prompt is planned: what of it is known better there."""

from __future__ import annotations

import numpy as np

from llamahybrid.prompt_cache.base import Costs, LiveView, Tokens
from llamahybrid.prompt_cache.disk_tier import DiskTier
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.prompt_cache.ram_tier import RamTier


def promote(disk: DiskTier, ram: RamTier, tokens: Tokens, view: LiveView, costs: Costs) -> None:
    """Take the best restore point on disk into RAM, if there is one that is deeper and comes cheaper."""
    total, live_lcp = len(tokens), common_prefix(tokens, view.tokens)
    anywhere = view.attention_is_all
    limit = total if view.reuse_limit is None else min(total, view.reuse_limit)
    if anywhere:
        limit = min(limit, total - 1)  # no logits lie on disk
    if view.needs_attention and view.split is None:
        limit = min(limit, live_lcp)  # no other attention can be put back
    while True:
        known = ram.known(tokens, view, costs)
        offer = disk.offer(view.namespace, tokens, known.cached, limit, known.missing, anywhere=anywhere)
        if offer is None:
            return
        saved = (offer.position - known.cached) * costs.prefill_seconds
        if saved and disk.seconds(offer.nbytes) > saved:
            return
        path = tokens[: offer.position]
        expected = ram.expect(view.namespace, path, offer.nbytes)
        if expected is None and anywhere:
            limit = offer.pieces[-1].start  # a chat's beginning is of use, too
            continue
        if expected is not None:
            loaded = disk.load(offer, path, view.split, saved)
            if loaded is not None:
                ram.take_in(view, path, loaded, expected, known.forgets, disk.store.name)
                return
            del expected
        limit = offer.position - 1  # never the same again, whatever the disk says


def recall_path(disk: DiskTier, ram: RamTier, tokens: Tokens, view: LiveView, costs: Costs) -> None:
    """Know what the disk knows of a prompt's path: where to cut depends on it."""
    known = ram.known(tokens, view, costs)
    length, followers = disk.known(view.namespace, tokens)
    if length > known.length or (length == known.length and len(followers) > 1 and not known.branches):
        path = tokens[:length].astype(np.int32)
        for longer in [np.append(path, np.int32(token)) for token in followers] or [path]:
            ram.remember(view.namespace, longer, view.state, known.forgets)
