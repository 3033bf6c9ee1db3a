"""Conversations go on after a restart as if there had been none, on real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.prompt_cache.placement import MIN_SPACING
from tests.lab.integrity import check_integrity
from tests.request.asking import ARCHS, take

SYSTEM = [(7 * i + 3) % 200 for i in range(120)]


@pytest.fixture(
    params=[
        *ARCHS,
        *(pytest.param(arch, marks=pytest.mark.full) for arch in ("jamba", "lfm2", "gemma3-full", "gpt-oss")),
    ]
)
def start(request, opened, tmp_path: Path):
    """Makes a model; with a disk tier unless told otherwise, on the same folder each time."""

    def make(cache: bool | PromptCache | None = None) -> Llama:
        cache = PromptCache(1 << 26, tmp_path / "cache") if cache is None else cache
        flash = {"flash_attn": True} if request.param in ("jamba", "gpt-oss") else {}
        return opened(request.param, prompt_cache=cache, n_batch=32, **flash)

    return make


def turns() -> list[list[int]]:
    """Two chats on one system prompt, in turn; the first has its thinking stripped, the second is edited."""
    first = [SYSTEM + [(11 * i + k) % 200 for i in range(60 + 70 * k)] for k in range(3)]
    second = [SYSTEM + [(13 * i + 1) % 200 for i in range(100)][: 100 - 20 * k] + [k] * 30 for k in range(3)]
    return [prompt for pair in zip(first, second, strict=True) for prompt in pair]


def test_restart_before_every_turn_goes_on_from_the_folder(start) -> None:
    """From the deepest prompt, answer or parting of histories before: a new parting costs once."""
    one = start(PromptCache(1 << 26))
    stayed = [take(one, p, 24) for p in turns()]
    written: list[list[int]] = []
    for prompt, text in zip(turns(), stayed, strict=True):
        llm = start()
        assert take(llm, prompt, 24) == text
        report = llm.last_request
        known = (len(path) for path in written if path == prompt[: len(path)])
        assert report.left <= len(prompt) - max(known, default=0) + MIN_SPACING
        written += [prompt[: report.matched], prompt, [*prompt, *text[:-1]]]
        llm.close()
        check_integrity(llm.prompt_cache)


def test_state_read_from_disk_gives_the_logits_of_a_fresh_context(start) -> None:
    prompt = turns()[4]
    first = start()
    take(first, prompt)
    first.close()
    again, fresh = start(), start(False)
    longer, rows = [*prompt, 5, 6, 7], []

    def note(_: Any, scores: Any) -> Any:
        rows.append(np.array(scores))
        return scores

    for llm in (again, fresh):
        take(llm, longer, 1, logits_processor=llama_cpp.LogitsProcessorList([note]))
    assert again.last_request.source == "disk"
    assert again.last_request.reason.endswith("from disk")
    assert np.abs(rows[0] - rows[1]).max() <= 1e-2 * np.ptp(rows[1])


def test_a_damaged_folder_costs_time_and_nothing_else(start, tmp_path: Path) -> None:
    prompt = turns()[4]
    first = start()
    expected = take(first, prompt)
    first.close()
    for path in (tmp_path / "cache").glob("*/*/*.val"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    again = start()
    assert take(again, prompt) == expected
    assert again.last_request.source == "none"
    assert again.prompt_cache.stats().extra["disk_damaged"] > 0
