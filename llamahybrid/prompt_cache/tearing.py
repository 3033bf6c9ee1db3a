"""Attention on disk that runs on from what stays into what is forgotten: its beginning is to stay, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.disk_index import DiskIndex, on_disk
from llamahybrid.prompt_cache.nodes import Node


@dataclass(frozen=True)
class Torn:
    """A record of attention that goes, and up to where others need it."""

    key: str
    namespace: str
    end: int


def torn(index: DiskIndex, tokens: Tokens, stays: int) -> list[Torn]:
    """Records that `index.on_path(tokens, stays)` names and whose attention begins in what stays.

    That is what the user pinned, the first `stays` tokens, and what other paths share.
    """
    return [each for name in index.tree.namespaces() for each in _torn(index, name, tokens, stays)]


def _torn(index: DiskIndex, namespace: str, tokens: Tokens, stays: int) -> Iterator[Torn]:
    match = index.tree.match(namespace, tokens)
    top = match.own_edge(len(tokens))
    if top is None:
        return
    end = max(stays, top.start)
    before = (p.records for n in match.path for p in on_disk(n).places if p.position <= end)
    if not any(r.is_checkpoint for records in before for r in records) and not _others(top):
        return  # nothing is restored there
    for segment in on_disk(top).through:
        if segment.start < end < segment.place.position:
            yield Torn(segment.key, namespace, end)


def _others(top: Node) -> bool:
    """Checkpoints lie behind what other paths share with this one, which leaves them with this edge."""
    parent, here = top.parent, on_disk(top)
    return parent is not None and on_disk(parent).below > here.below + here.checkpoints()
