"""Requests that tests of the stores make, as one process after the other would, and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llamahybrid.prompt_cache import Plan, PromptCache
from llamahybrid.prompt_cache.folder import FOREIGN
from tests.lab.fake_engine import CHEAP, FakeEngine, Kind

SLOW = replace(CHEAP, token_seconds=100.0, prefill_seconds=10.0)
"""Decoding costs so much that reading is always worth it."""

A = list(range(100, 400))
B = [*A[:150], *range(1000, 1150)]
"""Leaves A after 150 tokens."""

C = list(range(5000, 5200))


def ask(cache: PromptCache, prompt: Sequence[int], kind: Kind = "hybrid") -> Plan:
    """A request in a new context, with an answer."""
    return FakeEngine(cache, kind, costs=SLOW).request(prompt, answer=range(7000, 7100))


def files(folder: Path) -> list[Path]:
    """Its records."""
    return sorted(folder.glob("*/*/*.val"))


def everything(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder, with what is in it; of a database only that it is there."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and not path.name.startswith(FOREIGN)
        else None
        for path in sorted(folder.rglob("*"))
        if not path.name.endswith(("-wal", "-shm"))
    }


def filled(folder: Path) -> PromptCache:
    """A cache that has written three conversations."""
    cache = PromptCache(1 << 24, folder)
    for prompt in (A, B, C):
        ask(cache, prompt)
    assert cache.close()
    return cache
