"""Token paths as chained blocks, and the events that lead from one set of blocks to another.

Source: `BlockStored` and `BlockRemoved` of vLLM 0.11 (`vllm/distributed/kv_events.py`), in the map form that
Dynamo's router reads (`docs/integrations/kv-events-custom-engines.md`): the key "type" names the event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
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


def blocks_of(paths: Iterable[Tokens], size: int, model: str) -> dict[int, Block]:
    """All complete blocks of `size` tokens by hash, each after its parent; other models' hashes differ."""
    seed = xxhash.xxh3_64_intdigest(model.encode())
    return {block.hash: block for path in paths for block in _cut(ids_of(path), size, seed)}


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


@lru_cache(8192)
def _cut(ids: bytes, size: int, seed: int) -> tuple[Block, ...]:
    step, parent, found = ID_BYTES * size, None, list[Block]()
    for start in range(0, len(ids) - step + 1, step):
        piece = ids[start : start + step]
        name = xxhash.xxh3_64(piece, seed=seed if parent is None else parent).intdigest() >> 1
        found.append(Block(name, parent, piece))
        parent = name
    return tuple(found)
