"""The least possible work: tokens that an infinite, perfect cache would still have to decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix as compare_arrays


@dataclass(frozen=True)
class Exchange:
    """A prompt and the tokens sampled after it."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    """The last one was never decoded."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token lists."""
    return compare_arrays(np.array(a, np.int32), np.array(b, np.int32))


def least_decodes(exchanges: Sequence[Exchange], salts: Sequence[str] | None = None) -> list[int]:
    """Return the least tokens that each request of a conversation could decode.

    A request needs its prompt without the longest prefix ever evaluated before under its salt, at least the
    one token whose logits are sampled from (none if this very prompt was sampled from before), and each
    sampled token but the last.
    """
    evaluated: dict[str, list[Tokens]] = {}
    sampled: set[tuple[str, tuple[int, ...]]] = set()
    least = []
    for each, salt in zip(exchanges, salts or [""] * len(exchanges), strict=True):
        tokens = np.array(each.prompt + each.generated[:-1], np.int32)
        prompt = tokens[: len(each.prompt)]
        known = max((compare_arrays(prompt, other) for other in evaluated.get(salt, ())), default=0)
        rest = 0 if (salt, each.prompt) in sampled else max(1, len(each.prompt) - known)
        least.append(rest + max(0, len(each.generated) - 1))
        evaluated.setdefault(salt, []).append(tokens)
        sampled.add((salt, each.prompt))
    return least
