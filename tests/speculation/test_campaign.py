"""The campaign of drafts of `make fuzz` in small."""

from __future__ import annotations

import time

import pytest

from tests.lab import draft_fuzz

pytestmark = [pytest.mark.patched]


@pytest.mark.parametrize(
    "arch",
    [
        "qwen35",
        "gemma3",
        *(pytest.param(arch, marks=pytest.mark.full) for arch in ("llama", "mamba", "jamba", "lfm2")),
    ],
)
def test_drafts_accepted_and_rejected_at_random(tiny_model, arch):
    outcome = draft_fuzz.run(tiny_model(arch), seed=7, count=24, until=time.monotonic() + 600)
    assert outcome.patterns >= 24
    assert 0 < outcome.accepted < outcome.drafted
    kinds = {"gemma3": {"cut"}, "llama": {"cut"}, "jamba": {"snapshot"}, "mamba": {"snapshot"}}
    assert set(outcome.rollbacks) == kinds.get(arch, {"planes", "snapshot"})
