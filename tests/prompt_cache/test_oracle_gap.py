"""Tokens decoded over the least possible, that of an infinite perfect cache, on each kind of memory."""

from __future__ import annotations

import pytest

from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, raw
from tests.lab.fake_engine import Kind
from tests.lab.pretend import QWEN36_27B, Ours, PretendSpeech, play

SMALL = {workload.name: workload for workload in TOKEN_WORKLOADS if workload.n_ctx <= 8192}


def ratio(workload: Workload, kind: Kind, ram_bytes: int = 64 << 30) -> float:
    speech, ours = PretendSpeech(marked=workload.marked), Ours(QWEN36_27B, ram_bytes, kind)
    records = list(play(workload.start(speech), speech, ours))
    counted = slice(workload.measured_from, None)
    return sum(r.decoded for r in records[counted]) / sum(least_decodes(records)[counted])


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "window"])
@pytest.mark.parametrize("name", SMALL)
def test_chats_decode_only_what_is_new(name: str, kind: Kind) -> None:
    assert ratio(SMALL[name], kind) <= SMALL[name].bound


@pytest.mark.parametrize("name", ["thinking stripped", "edit a middle message", "agent loop"])
def test_raw_prompts_without_message_starts_stay_near(name: str) -> None:
    workload = raw(SMALL[name])
    assert ratio(workload, "hybrid") <= workload.bound


def test_a_budget_of_a_few_snapshots_keeps_the_places_where_histories_diverge() -> None:
    """About eight snapshots against many more taken: message starts outlive checkpoints within answers."""
    assert ratio(SMALL["thinking stripped"], "hybrid", 8 * QWEN36_27B.snapshot) <= 1.02
