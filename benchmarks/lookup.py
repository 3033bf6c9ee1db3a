"""How long a plan takes in a full cache: a tree of 1,000,000 tokens and 2,000 branches, prompts of 32,000.

All branches leave one long document, so that the prompt's path has as many nodes as it can have.
Run: python -m benchmarks.lookup [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
from rich.console import Console

from llamahybrid.harness.tables import machine
from llamahybrid.prompt_cache import Costs, LiveView, PromptCache
from llamahybrid.prompt_cache.base import Tokens

TARGET_MS = 1.0
BRANCHES, BRANCH_TOKENS, PROMPT = 2000, 484, 32_000
WORDS = 150_000


def full_cache(trunk: Tokens, rng: np.random.Generator) -> PromptCache:
    """A cache that remembers the document and what branched off it."""
    cache = PromptCache(1 << 30)
    for at in rng.integers(0, PROMPT, BRANCHES):
        branch = rng.integers(0, WORDS, BRANCH_TOKENS, dtype=np.int32)
        cache.remember("model", np.concatenate([trunk[:at], branch]))
    cache.remember("model", trunk)
    return cache


def main(rounds: int) -> int:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, WORDS, PROMPT, dtype=np.int32)
    cache = full_cache(trunk, rng)
    view = LiveView("model", trunk[:100].copy(), 100, True, True, False)
    console, missed = Console(), 0
    prompts = {
        "the whole document": np.concatenate([trunk[:-1], trunk[:1]]),
        "half of it": np.concatenate([trunk[: PROMPT // 2], rng.integers(0, WORDS, PROMPT // 2, np.int32)]),
    }
    for name, prompt in prompts.items():
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            plan = cache.plan(prompt, view, (), Costs())
            times.append((time.perf_counter() - started) * 1e3)
            cache.release(plan)
        middle = statistics.median(times)
        missed += middle > TARGET_MS
        console.print(
            f"{name}: matched {plan.matched:,} tokens in {middle:.2f} ms (target {TARGET_MS:.0f} ms)"
        )
    console.print(f"{cache.stats().extra['tokens']:,} tokens. {machine()}", style="dim")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    sys.exit(main(parser.parse_args().rounds))
