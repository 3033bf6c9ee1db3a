"""Token paths as chained blocks, and the events that lead from one set of blocks to another.

Source: `BlockStored` and `BlockRemoved` of vLLM 0.11 (`vllm/distributed/kv_events.py`), in the map form that
Dynamo's router reads (`docs/integrations/kv-events-custom-engines.md`): the key "type" names the event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import xxhash

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import ID_BYTES, ids_of, tokens_of


class Block(NamedTuple):
    """A fixed number of tokens of a path."""

    hash: int
    """Of these tokens and all before them, below 2**63."""
    parent: int | None
    """Hash of the previous block; None for the first."""
    ids: bytes
    """See `nodes.ids_of`."""


class Cutter:
    """Cuts paths into blocks; the paths of the last call are known in the next one."""

    def __init__(self, size: int) -> None:
        """`size`: tokens of a block."""
        self._size = size
        self._known: dict[tuple[int, bytes], tuple[Block, ...]] = {}

    def blocks_of(self, groups: Mapping[str, Iterable[Tokens]], model: str) -> dict[str, dict[int, Block]]:
        """All complete blocks of each group by hash, each after its parent; other models' hashes differ."""
        seed = xxhash.xxh3_64_intdigest(model.encode())
        known, self._known = self._known, {}
        found: dict[str, dict[int, Block]] = {group: {} for group in groups}
        for group, paths in groups.items():
            for path in paths:
                ids = ids_of(path)
                name = seed, xxhash.xxh3_128_digest(ids)
                cut = self._known[name] = known.get(name) or _cut(ids, self._size, seed)
                found[group].update((block.hash, block) for block in cut)
        return found


def events(old: Mapping[int, Block], new: Mapping[int, Block], medium: str) -> Iterator[dict[str, Any]]:
    """The events from `old` to `new`; consecutive blocks of a path are one event."""
    if removed := [name for name in old if name not in new]:
        yield {"type": "BlockRemoved", "block_hashes": removed, "medium": medium}
    chain: list[Block] = []
    for block in [*(block for name, block in new.items() if name not in old), None]:
        if chain and (block is None or block.parent != chain[-1].hash):
            yield {
                "type": "BlockStored",
                "block_hashes": [each.hash for each in chain],
                "parent_block_hash": chain[0].parent,
                "token_ids": tokens_of(b"".join(each.ids for each in chain)).tolist(),
                "block_size": len(chain[0].ids) // ID_BYTES,
                "lora_id": None,
                "medium": medium,
                "lora_name": None,
            }
            chain = []
        if block is not None:
            chain.append(block)


def _cut(ids: bytes, size: int, seed: int) -> tuple[Block, ...]:
    step, parent, found = ID_BYTES * size, None, list[Block]()
    for start in range(0, len(ids) - step + 1, step):
        piece = ids[start : start + step]
        name = xxhash.xxh3_64(piece, seed=seed if parent is None else parent).intdigest() >> 1
        found.append(Block(name, parent, piece))
        parent = name
    return tuple(found)
