"""KV events as bytes: vLLM's, each event a map, for routers of llm-d and Dynamo.

A message has three frames: topic, sequence number (8 bytes, big endian), and a batch as MessagePack, the
array [time, events, rank]. Source: vLLM 0.11, `vllm/distributed/kv_events.py` and
`examples/online_serving/kv_events_subscriber.py`; the map form as Dynamo's router reads it
(`docs/integrations/kv-events-custom-engines.md`): the key "type" names the event.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgpack

from llamahybrid.events.blocks import Block, Change
from llamahybrid.prompt_cache.nodes import tokens_of

Medium: TypeAlias = Literal["GPU", "CPU", "DISK"]
"""Where it lies. "GPU": live in a slot, wherever it is; "CPU": in the cache's RAM; "DISK": its folder."""

END = (-1).to_bytes(8, "big", signed=True)
"""Instead of a sequence number: all that was asked for again has been sent."""


def events_of(change: Change, medium: Medium, size: int) -> Iterator[dict[str, Any]]:
    """Blocks that follow one another are one event."""
    if change.removed:
        yield {"type": "BlockRemoved", "block_hashes": list(change.removed), "medium": medium}
    chain: list[Block] = []
    for block in change.stored:
        if chain and block.parent != chain[-1].hash:
            yield _stored(chain, medium, size)
            chain = []
        chain.append(block)
    if chain:
        yield _stored(chain, medium, size)


def _stored(chain: Sequence[Block], medium: Medium, size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [block.hash for block in chain],
        "parent_block_hash": chain[0].parent,
        "token_ids": [int(token) for block in chain for token in tokens_of(block.ids)],
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def batch(events: Sequence[dict[str, Any]], rank: int = 0) -> bytes:
    """A message's last frame."""
    packed: bytes = msgpack.packb([time.time(), list(events), rank])
    return packed


def number(sequence: int) -> bytes:
    """A sequence number's frame."""
    return sequence.to_bytes(8, "big")
