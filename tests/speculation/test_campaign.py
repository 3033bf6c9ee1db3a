"""The campaign of `make fuzz` in small: it passes where it should, and fails where it must."""

from __future__ import annotations

import time

import numpy as np
import pytest

from llamahybrid.memory import verification
from llamahybrid.memory.planes import Planes
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.speculation.drafts import Drafts
from tests.lab import draft_fuzz
from tests.lab.differential import Mismatch


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba", "lfm2", "gemma3", "llama"])
def test_drafts_accepted_and_rejected_at_random(tiny_model, arch):
    outcome = draft_fuzz.run(tiny_model(arch), seed=7, count=24, until=time.monotonic() + 600)
    assert outcome.patterns >= 24
    assert 0 < outcome.accepted < outcome.drafted
    kinds = {"gemma3": {"cut"}, "llama": {"cut"}, "jamba": {"snapshot"}, "mamba": {"snapshot"}}
    assert set(outcome.rollbacks) == kinds.get(arch, {"planes", "snapshot"})


def test_a_row_that_the_batch_decides_is_a_tie_and_no_other(tiny_model):
    model = tiny_model("bailingmoe3")
    trial = draft_fuzz.Trial(model, draft_fuzz.SETTINGS[0], 1, planes=False)
    reference, prompt, answer = trial._reference, [1, 2, 3], [4, 5, 6]
    rows = reference.logits(prompt, answer[:-1])
    flipped = rows + np.float32(0.5) * rows.std() * np.arange(rows.shape[1]) / rows.shape[1]
    reference.logits = lambda tokens, answer=(), every=False, cuts=(): np.concatenate([rows[:2], flipped])
    apart = trial._apart([rows[0], flipped[1], rows[2]], rows, prompt, answer)
    assert max(apart) < 1e-6
    assert trial.outcome.ties == 1
    reference.logits = lambda tokens, answer=(), every=False, cuts=(): np.concatenate([rows[:2], rows])
    assert max(trial._apart([rows[0], flipped[1], rows[2]], rows, prompt, answer)) > 1e-2
    trial.close()


def test_a_campaign_without_time_tries_every_way_once(tiny_model):
    outcome = draft_fuzz.run(tiny_model("qwen35"), seed=7, count=1000, until=0.0)
    assert outcome.patterns == 4 * draft_fuzz.PER_TEXT
    assert outcome.rollbacks["planes"] > 0


def seen(model) -> None:
    with pytest.raises((Mismatch, RuntimeError)):
        draft_fuzz.run(model, seed=7, count=100, until=time.monotonic() + 600)


def test_a_campaign_sees_a_rollback_that_did_not_happen(tiny_model, monkeypatch):
    def trusting(live, position):
        live.state.n = min(live.state.n, position)
        return True

    monkeypatch.setattr(LiveSequence, "cut", trusting)
    monkeypatch.setattr(verification, "memory_fault", lambda *_, **__: None)
    seen(tiny_model("qwen35"))


def test_a_campaign_sees_memory_that_is_kept(tiny_model, monkeypatch):
    if not draft_fuzz.patched():
        pytest.skip("this library cannot resize rollback planes")
    monkeypatch.setattr(Planes, "shrink", lambda planes: None)
    seen(tiny_model("qwen35"))


def test_a_campaign_sees_guesses_that_stay(tiny_model, monkeypatch):
    monkeypatch.setattr(Drafts, "go_back", lambda drafts, n: False)
    seen(tiny_model("mamba"))
