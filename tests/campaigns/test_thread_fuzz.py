"""Threads and objects that share a prompt cache: a short round of the campaign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid.prompt_cache import PromptCache
from tests.lab import thread_fuzz
from tests.lab.differential import Mismatch
from tests.lab.reference import Reference
from tests.lab.thread_fuzz import SETTING, Outcome, shortfall, stress

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("arch", ["qwen35", "mamba", "gemma3"])
def test_every_answer_of_every_thread_is_a_cold_one(tiny_model: TinyModel, arch: str) -> None:
    outcome = Outcome()
    stress(tiny_model(arch, window=16), 5, outcome)
    assert outcome.requests == 48
    assert outcome.cached > 0


def test_an_answer_that_is_not_is_noticed(tiny_model: TinyModel) -> None:
    reference = Reference(tiny_model("qwen35"), SETTING)
    try:
        prompt = list(range(10, 60))
        best = int(reference.logits(prompt)[-1].argmax())
        assert shortfall(reference, prompt, [best]) == 0.0
        with pytest.raises(Mismatch):
            shortfall(reference, prompt, [(best + 7) % 200])
    finally:
        reference.close()


def test_an_error_in_a_thread_is_the_rounds(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cache: PromptCache) -> None:
        raise AssertionError("miscounted")

    monkeypatch.setattr(thread_fuzz, "check_integrity", broken)
    with pytest.raises(AssertionError, match="miscounted"):
        stress(tiny_model("mamba", window=16), 1, Outcome())
