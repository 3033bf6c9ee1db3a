"""Budgets on workloads without a model, at the proportions of a real one."""

from __future__ import annotations

from statistics import fmean

import pytest

from llamahybrid.harness.workloads.multi_user import CROWDS
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, exact_append, long_prompt, mid_generation
from tests.lab.in_process import oracle_ratio
from tests.lab.pretend import QWEN36_27B, Ours, PretendSpeech, play

GIB = 1 << 30


@pytest.mark.parametrize(("gib", "mean", "most"), [(4, 1.05, 1.15), (16, 1.02, 1.06)])
def test_a_budget_that_suffices_decodes_hardly_more_than_has_to_be(
    gib: int, mean: float, most: float
) -> None:
    found = []
    for workload in (*TOKEN_WORKLOADS, *CROWDS):
        if workload.start not in (long_prompt, mid_generation):
            speech = PretendSpeech()
            records = list(play(workload.start(speech), speech, Ours(QWEN36_27B, gib * GIB)))
            found.append(oracle_ratio(records, workload.measured_from))
    assert fmean(found) <= mean
    assert max(found) <= most


def test_every_budget_has_the_same_conversation() -> None:
    asked = []
    for gib in (1, 4):
        speech = PretendSpeech()
        records = play(exact_append(speech), speech, Ours(QWEN36_27B, gib * GIB))
        asked.append([(r.prompt, r.generated) for r in records])
    assert asked[0] == asked[1]


def test_starts_are_where_messages_and_thinking_start() -> None:
    speech = PretendSpeech()
    prompt = speech.message(5, "system") + speech.message(4) + speech.reply(thinking=True)
    assert speech.starts(prompt) == [5, 9, 12]
    assert PretendSpeech(marked=False).starts(prompt) == []
