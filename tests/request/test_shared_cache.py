"""A cache with several users: forgotten text is gone, no text is shown, damage stays local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import PromptCache
from tests.lab.disk_fuzz import stored
from tests.lab.integrity import check_integrity
from tests.request.asking import CUTS, Batches, take

Opened = Callable[..., Any]
SECRET = [(7 * i + 3) % 150 for i in range(120)]
OTHER = [(11 * i + 5) % 200 for i in range(50)]


def entries_of(cache: PromptCache, tokens: Sequence[int]) -> int:
    """Tokens of a path that the cache knows in any namespace."""
    return max(
        (cache.tree.match(n, np.array(tokens, np.int32)).length for n in cache.tree.namespaces()),
        default=0,
    )


def records_of(folder: Path, tokens: Sequence[int]) -> int:
    """Records on disk that begin as the tokens do."""
    paths = [path for _, path in stored(folder)[1].values()]
    ends = [min(len(tokens), len(path)) for path in paths]
    return sum(np.array_equal(p[:n], tokens[:n]) for p, n in zip(paths, ends, strict=True))


# -- forget ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", CUTS)
def test_forgotten_stays_forgotten(opened: Opened, tmp_path: Path, arch: str) -> None:
    cache = PromptCache(1 << 28, tmp_path)
    llm, other = opened(arch, prompt_cache=cache), opened(arch, prompt_cache=cache)
    take(llm, SECRET, 80)
    take(other, [*SECRET, 9], 20)
    cache.forget(SECRET[:20])
    for one in (llm, other):
        take(one, OTHER)
    cache.flush()
    assert (entries_of(cache, SECRET), records_of(tmp_path, SECRET)) == (0, 0)
    answer = take(llm, [*SECRET, 5])
    assert (llm.last_request.cached, llm.last_request.matched, llm.last_request.source) == (0, 0, "none")
    assert answer == take(opened(arch, llama_cpp.Llama), [*SECRET, 5])
    take(llm, [*SECRET, 5, *answer[:3], 7])
    assert llm.last_request.cached > 100, "asked for again it is a chat like any other"
    check_integrity(cache)


@pytest.mark.parametrize("arch", CUTS)
def test_live_state_does_not_serve_a_forgotten_prompt(opened: Opened, arch: str) -> None:
    llm = opened(arch)
    for prompt in (SECRET, [*SECRET, 5]):
        take(llm, SECRET)
        llm.prompt_cache.forget(SECRET)
        take(llm, prompt, 1)
        assert (llm.last_request.cached, llm.last_request.source) == (0, "none")


def test_one_forgotten_while_its_prompt_is_decoded_leaves_nothing(opened: Opened) -> None:
    llm = opened()
    batches = Batches(llm)
    batches.after[0] = lambda: llm.prompt_cache.forget(SECRET[:110])
    take(llm, SECRET, 2)
    take(llm, OTHER, 1)
    assert entries_of(llm.prompt_cache, SECRET) == 0


# -- reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("explain", [False, True])
def test_other_users_tokens_are_spelt_with_explain_alone(opened: Opened, explain: bool) -> None:
    llm = opened(explain=explain)
    reports: list[Any] = []
    llm.on_request = reports.append
    take(llm, [*OTHER[:30], *b"PIN 4711"])
    for text in (b"PIN x", b"PIN 4x"):
        take(llm, [*OTHER[:30], *text], 1)
    llm.reset()
    take(llm, OTHER, 1)
    said = [report.reason for report in reports[1:3]]
    spelt = [llm.detokenize([token], special=True).decode() for token in b"x47"]
    for reason, old in zip(said, spelt[1:], strict=True):
        assert repr(spelt[0]) in reason
        assert (f"{spelt[0]!r} was {old!r}" in reason) == explain
        assert (repr(old) in reason) == explain


# -- damage ----------------------------------------------------------------------------------------


def flip(cache: PromptCache, start: int = 0) -> int:
    """Turn a bit in every stored segment from a position on; how many there are."""
    segments = [s for n in cache.tree.oldest_nodes() for s in n.segments if s.start >= start]
    for segment in segments:
        segment.record.flags.writeable = True
        segment.record[200] ^= 1
    return len(segments)


def test_a_segment_that_does_not_load_costs_no_checkpoint(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, fresh = opened(), opened("qwen35", llama_cpp.Llama)
    take(llm, SECRET, 40)
    take(llm, OTHER)
    cache = llm.prompt_cache
    damaged, dropped = flip(cache), []
    monkeypatch.setattr(cache, "drop", dropped.append)
    assert take(llm, [*SECRET, 5]) == take(fresh, [*SECRET, 5])
    assert not dropped, "only what was damaged goes"
    assert 0 < cache.stats().extra["damaged"] <= damaged
    take(llm, OTHER)
    assert take(llm, [*SECRET, 6]) == take(fresh, [*SECRET, 6])
    assert llm.last_request.cached == len(SECRET), "and was stored anew"
