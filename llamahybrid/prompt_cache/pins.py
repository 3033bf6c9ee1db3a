"""Prefixes that the user pinned, by their ids (`nodes.ids_of`): checkpoints on them keep their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamahybrid.prompt_cache.base import Tokens, same_start
from llamahybrid.prompt_cache.nodes import ids_of


def lies_on(path: Tokens, prefixes: Iterable[bytes]) -> bool:
    """Return whether a path is the beginning of one of these."""
    ids = ids_of(path)
    return any(each.startswith(ids) for each in prefixes)


def pinned_before(pinned: Sequence[Tokens], tokens: Tokens) -> int:
    """Length of the longest of the pinned prefixes that these tokens go on from; 0 if there is none."""
    return max((len(p) for p in pinned if len(p) < len(tokens) and same_start(p, tokens)), default=0)
