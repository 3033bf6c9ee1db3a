"""Resumable prefixes: the depth to which each known path can be restored without live state.

For routers that send requests to one of several caches. The planner and the disk's index are asked path by
path, so that no lock is held for long. Looking makes nothing older or younger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llamahybrid.prompt_cache.base import Costs, LiveView, Tokens, same_start
from llamahybrid.prompt_cache.nodes import Node, tokens_of
from llamahybrid.prompt_cache.seen import Seen, uncovered
from llamahybrid.prompt_cache.tree import Tree

if TYPE_CHECKING:
    from llamahybrid.prompt_cache.cache import PromptCache

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKEN = np.array([-1], np.int32)
"""Goes on from every path, and is on none."""

MOST_PATHS = 4096
"""In RAM; the rest is not told of."""

MOST_ON_DISK = 512
"""Places that are looked at."""

LOOK_SECONDS = 2.0


def in_ram(cache: PromptCache, view: LiveView) -> Iterator[Tokens]:
    """The deepest restorable prefix of each path in RAM, shape (n,) each. `view`: of such a context."""
    alone = without_live(view)
    for path in cache.look(lambda store: _ends(store.tree, view.namespace)) or ():
        tokens = _tokens_to(path)
        if depth := cache.peek(np.concatenate((tokens, NO_TOKEN)), alone, Costs()):
            yield tokens[:depth]


def on_disk_paths(cache: PromptCache, view: LiveView) -> Iterator[Tokens]:
    """The same of the paths that were added to the folder last; nothing without one."""
    if cache.disk is None or (view.needs_attention and view.split is None):
        return
    told: list[Tokens] = []
    for namespace, tokens, _ in cache.disk.glance(LOOK_SECONDS, MOST_ON_DISK)[0]:
        if namespace != view.namespace or any(same_start(tokens, longer[: len(tokens)]) for longer in told):
            continue
        seen = cache.disk.look(namespace, tokens)
        if seen is not None and (depth := _depth(seen, view)):
            told.append(tokens)
            yield tokens[:depth]


def without_live(view: LiveView) -> LiveView:
    """The view of a context of the same kind in which nothing is."""
    return replace(view, tokens=NO_TOKENS, cut_floor=0, tip_logits=False, reuse_limit=None, state=None)


def _ends(tree: Tree, namespace: str) -> list[tuple[bytes, ...]]:
    """The edges of each path from its root to a leaf; edges are shared, not copied."""
    if namespace not in tree.namespaces():
        return []
    found: list[tuple[bytes, ...]] = []
    ahead: list[Node] = list(tree.root(namespace).children.values())
    while ahead and len(found) < MOST_PATHS:
        node = ahead.pop()
        if node.children:
            ahead += node.children.values()
        else:
            found.append(tuple(above.edge for above in node.path())[::-1])
    return found


def _tokens_to(path: tuple[bytes, ...]) -> Tokens:
    return tokens_of(b"".join(path))


def _depth(seen: Seen, view: LiveView) -> int:
    """Return the number of tokens of a path that the disk alone can restore."""
    if view.attention_is_all:
        return next((start for start, _ in uncovered(seen.along(seen.total), seen.total)), seen.total)
    ends = sorted({item.end for item in seen.items}, reverse=True)
    return next((e for e in ends if seen.serves(e, logits=False, attention=view.needs_attention)), 0)
