"""Times of saving the state of a conversation and of restoring it, beside a memcpy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from llamahybrid.harness.report import Saving

Save = Callable[[], int]
"""Saves the live state and returns its bytes."""
Restore = Callable[[], None]
"""Restores the state that was saved last."""

ROUNDS = 7


def measured(llm: Any, kind: str, tokens: Sequence[int]) -> Saving | None:
    """Measure the state of `tokens` by the functions of a kind of target; None: not supported."""
    llm.reset()
    llm.eval(list(tokens))
    if kind == "ours":
        pair = None if llm.runner is None else _ours(llm.runner.live)
    else:
        pair = _upstream(llm, tuple(tokens)) if kind in ("stock", "stock+ram", "stock+disk") else None
    return None if pair is None else timed(*pair)


def timed(save: Save, restore: Restore) -> Saving:
    """Return medians over rounds of a save, a memcpy of as many bytes, and a restore, in turn."""
    for _ in range(2):  # both buffers, where there are two
        size = save()
    restore()
    source = np.ones(size, np.uint8)
    copies = np.ones((2, size), np.uint8)  # touched, and not the one of the round before
    seconds: list[tuple[float, float, float]] = []
    for number in range(ROUNDS):
        began = time.perf_counter()
        save()
        saved = time.perf_counter()
        np.copyto(copies[number % 2], source)
        copied = time.perf_counter()
        restore()
        seconds.append((saved - began, time.perf_counter() - copied, copied - saved))
    saves, restores, memcpys = zip(*seconds, strict=True)
    return Saving(size, median(saves), median(restores), median(memcpys))


def _upstream(llm: Any, tokens: tuple[int, ...]) -> tuple[Save, Restore]:
    """Return `save_state` and `load_state`, through the cache if one is set."""
    kept: dict[tuple[int, ...], Any] = {}
    where = kept if llm.cache is None else llm.cache

    def save() -> int:
        state = llm.save_state()
        where[tokens] = state
        return int(state.llama_state_size) + int(state.scores.nbytes) + int(state.input_ids.nbytes)

    return save, lambda: llm.load_state(where[tokens])


def _ours(live: Any) -> tuple[Save, Restore]:
    """Return the save of a checkpoint and its attention, and a verified restore."""
    from llamahybrid.memory.restore import restore as go_back
    from llamahybrid.prompt_cache.base import Bytes, Segment

    tokens, buffers = live.tokens.copy(), dict[tuple[int, int], Bytes]()
    kept: list[Any] = []
    turn = [0]

    def buffer(n_bytes: int) -> Bytes:
        key = turn[0] % 2, n_bytes
        if key not in buffers:
            buffers[key] = np.ones(n_bytes, np.uint8)
        return buffers[key]

    def save() -> int:
        turn[0] += 1
        record = None if live.profile.attention_is_all else live.snapshot(buffer, deep=False)
        pages = live.profile.needs_attention and live.profile.pager is not None
        segment: Segment | None = live.page_out(0, live.n, buffer, deep=False) if pages else None
        if (record is None and not live.profile.attention_is_all) or (pages and segment is None):
            raise RuntimeError("the state cannot be vouched for")
        kept[:] = [record, () if segment is None else (segment,)]
        return sum(int(each.nbytes) for each in (record, segment) if each is not None)

    def restore() -> None:
        fault = go_back(live, kept[0], tokens, kept[1])
        if fault:
            raise RuntimeError(f"the state was not restored: {fault}")

    return save, restore
