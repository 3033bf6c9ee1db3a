"""The least possible work: what an infinite, perfect cache would still have to decode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamahybrid.harness.conversation import Record
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix as compare_arrays


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists."""
    return compare_arrays(np.array(a, np.int32), np.array(b, np.int32))


def least_decodes(records: Sequence[Record], salts: Sequence[str] | None = None) -> list[int]:
    """Least tokens each request of one conversation could decode; with `salts`, one each, they share nothing.

    A request needs its prompt without the longest prefix ever evaluated before, at least the one token whose
    logits it samples from (none if this very prompt was sampled from before), and each sampled token but the
    last, which is never decoded.
    """
    evaluated: dict[str, list[Tokens]] = {}
    sampled: set[tuple[str, tuple[int, ...]]] = set()
    least = []
    for record, salt in zip(records, salts or [""] * len(records), strict=True):
        tokens = np.array(record.prompt + record.generated[:-1], np.int32)
        prompt = tokens[: len(record.prompt)]
        known = max((compare_arrays(prompt, other) for other in evaluated.get(salt, ())), default=0)
        rest = 0 if (salt, record.prompt) in sampled else max(1, len(record.prompt) - known)
        least.append(rest + max(0, len(record.generated) - 1))
        evaluated.setdefault(salt, []).append(tokens)
        sampled.add((salt, record.prompt))
    return least


def oracle_ratio(records: Sequence[Record], first: int = 0) -> float:
    """Tokens decoded over the least possible, from request number `first` on."""
    least = sum(least_decodes(records)[first:])
    return sum(record.decoded for record in records[first:]) / least
