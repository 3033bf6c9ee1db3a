"""Resumable prefixes: the depth to which each known path can be restored without live state.

The planner and the disk's index are asked path by path, so that no lock is held for long. Looking makes
nothing older or younger.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from llamahybrid.prompt_cache import Costs, LiveView, PromptCache
from llamahybrid.prompt_cache.base import Tokens, same_start
from llamahybrid.prompt_cache.nodes import tokens_of
from llamahybrid.prompt_cache.store import RamStore

MOST_PATHS = 4096
"""Of RAM, and of the folder's newest places the eighth part; others are not published."""

LOOK_SECONDS = 2.0


def in_ram(cache: PromptCache, view: LiveView) -> Iterator[Tokens]:
    """Yield the deepest restorable prefix of each path in RAM, shape (n,). `view`: an empty context's."""

    def edges(store: RamStore) -> list[tuple[bytes, ...]]:
        leaves = (node for node in store.tree.below(view.namespace) if not node.children)
        return [tuple(above.edge for above in leaf.path())[::-1] for leaf in islice(leaves, MOST_PATHS)]

    for path in cache.look(edges) or ():
        tokens = tokens_of(b"".join(path))
        if depth := cache.peek(_going_on(tokens), view, Costs()):
            yield tokens[:depth]


def on_disk(cache: PromptCache, view: LiveView) -> Iterator[Tokens]:
    """Yield the same of the paths that were added to the folder last; nothing without one."""
    if cache.disk is None or (view.needs_attention and view.split is None):
        return
    told: list[Tokens] = []
    for namespace, tokens, _ in cache.disk.glance(LOOK_SECONDS, MOST_PATHS // 8)[0]:
        if namespace != view.namespace or any(same_start(tokens, longer[: len(tokens)]) for longer in told):
            continue
        seen = cache.disk.look(namespace, _going_on(tokens))
        missing = [(0, len(tokens))] if view.needs_attention else []
        if seen is None:
            continue
        if offer := seen.offer(0, len(tokens), missing, anywhere=view.attention_is_all):
            told.append(tokens)
            yield tokens[: offer.position]


def _going_on(tokens: Tokens) -> Tokens:
    """A path with one more token, which no path has: all of it may be restored."""
    return np.append(tokens, np.int32(-1))
