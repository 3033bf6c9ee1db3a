"""Token paths as blocks of a fixed size, each named by all the tokens up to its end.

Source: `BlockStored` and `BlockRemoved` of vLLM 0.11 (`vllm/distributed/kv_events.py`), where hashes are
those of a chain: a block's name depends on its parent's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import ID_BYTES, ids_of


@dataclass(frozen=True, slots=True)
class Block:
    """Some tokens of a path."""

    hash: int
    """Of these and all before, below 2**63."""
    parent: int | None
    """The hash of the block before; None for a path's first."""
    ids: bytes = field(repr=False)
    """See `nodes.ids_of`."""


class Blocks:
    """Cuts paths into blocks; remembers those it cut last time, for they are mostly the same."""

    def __init__(self, size: int, seed: str) -> None:
        """`size`: tokens a block. `seed`: whose paths they are; others' hashes are different."""
        if size < 1:
            raise ValueError(f"a block has at least one token, not {size}")
        self.size = size
        self._seed = xxhash.xxh3_64_intdigest(seed.encode())
        self._known: dict[bytes, tuple[Block, ...]] = {}

    def of(self, paths: Iterable[Tokens]) -> dict[int, Block]:
        """All whole blocks of these paths by hash, each after its parent."""
        before, self._known = self._known, {}
        blocks: dict[int, Block] = {}
        for path in paths:
            ids = ids_of(path)
            name = xxhash.xxh3_128_digest(ids)
            cut = self._known[name] = before.get(name) or self._cut(ids)
            blocks.update((block.hash, block) for block in cut)
        return blocks

    def _cut(self, ids: bytes) -> tuple[Block, ...]:
        step, parent, blocks = ID_BYTES * self.size, None, list[Block]()
        for start in range(0, len(ids) - step + 1, step):
            piece = ids[start : start + step]
            named = xxhash.xxh3_64(piece, seed=self._seed if parent is None else parent)
            block = Block(named.intdigest() >> 1, parent, piece)
            parent = block.hash
            blocks.append(block)
        return tuple(blocks)


@dataclass(frozen=True)
class Change:
    """From one set of blocks to another."""

    stored: tuple[Block, ...]
    """Each after its parent."""
    removed: tuple[int, ...]


def change(old: Mapping[int, Block], new: Mapping[int, Block]) -> Change:
    """What has to be told of."""
    stored = tuple(block for name, block in new.items() if name not in old)
    return Change(stored, tuple(name for name in old if name not in new))
