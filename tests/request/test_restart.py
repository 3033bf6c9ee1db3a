"""Conversations go on after a restart as if there had been none, on real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from tests.lab.integrity import check_integrity

SYSTEM = [(7 * i + 3) % 200 for i in range(120)]
MODELS: dict[str, dict[str, Any]] = {
    "qwen35": {},
    "jamba": {"flash_attn": True},
    "mamba": {},
    "lfm2": {},
    "gemma3": {"swa_full": False, "n_batch": 32, "n_ubatch": 32},
    "gemma3-full": {},
    "llama": {},
    "gpt-oss-full": {"flash_attn": True},
}


@pytest.fixture(params=MODELS)
def start(request, tiny_model, tmp_path: Path):
    """Makes a model; with a disk tier unless told otherwise, on the same folder each time."""
    arch = request.param.removesuffix("-full")
    model = tiny_model(arch, **({"window": 16} if arch in ("gemma3", "gpt-oss") else {}))
    made: list[Llama] = []

    def make(cache: bool | PromptCache | None = None) -> Llama:
        cache = PromptCache(1 << 26, tmp_path / "cache") if cache is None else cache
        options = {"n_ctx": 1024, "n_threads": 1, "verbose": False, **MODELS[request.param]}
        made.append(Llama(str(model), prompt_cache=cache, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def turns() -> list[list[int]]:
    """Two chats on one system prompt, in turn; the first has its thinking stripped, the second is edited."""
    first = [SYSTEM + [(11 * i + k) % 200 for i in range(60 + 70 * k)] for k in range(3)]
    second = [SYSTEM + [(13 * i + 1) % 200 for i in range(100)][: 100 - 20 * k] + [k] * 30 for k in range(3)]
    return [prompt for pair in zip(first, second, strict=True) for prompt in pair]


def answer(llm: Llama, prompt: list[int], n: int = 24) -> list[int]:
    out: list[int] = []
    for token in llm.generate(prompt, temp=0.0):
        out.append(token)
        if len(out) == n:
            break
    return out


def test_a_restart_before_every_turn_goes_on_from_what_was_written(start) -> None:
    """From the deepest prompt, answer or parting of histories before: a new parting costs once."""
    one = start(PromptCache(1 << 26))
    stayed = [answer(one, p) for p in turns()]
    written: list[list[int]] = []
    for prompt, text in zip(turns(), stayed, strict=True):
        llm = start()
        assert answer(llm, prompt) == text
        report = llm.last_request
        known = (len(path) for path in written if path == prompt[: len(path)])
        assert report.left <= len(prompt) - max(known, default=0) + MIN_SPACING
        written += [prompt[: report.matched], prompt, [*prompt, *text[:-1]]]
        llm.close()
        check_integrity(llm.prompt_cache)


def test_what_was_read_gives_the_logits_of_a_fresh_context(start) -> None:
    prompt = turns()[4]
    first = start()
    answer(first, prompt)
    first.close()
    again, fresh = start(), start(False)
    longer = [*prompt, 5, 6, 7]
    assert answer(again, longer, 1) == answer(fresh, longer, 1)
    assert again.last_request.source == "disk"
    assert again.last_request.reason.endswith("from disk")
    mine = again.runner.live.row.logits()
    theirs = np.ctypeslib.as_array(fresh._ctx.get_logits_ith(-1), shape=(fresh.n_vocab(),))
    assert np.abs(mine - theirs).max() <= 1e-2 * np.ptp(theirs)


def test_a_damaged_folder_costs_time_and_nothing_else(start, tmp_path: Path) -> None:
    prompt = turns()[4]
    first = start()
    expected = answer(first, prompt)
    first.close()
    for path in (tmp_path / "cache").glob("*/*/*.record"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    again = start()
    assert answer(again, prompt) == expected
    assert again.last_request.source == "none"
    assert again.prompt_cache.stats().extra["disk_damaged"] > 0
