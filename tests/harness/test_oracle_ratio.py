"""Tokens that llamahybrid decodes beyond the least possible number, by the native counters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.tokens import long_prompt, raw
from tests.lab.costs import DEAR, with_costs
from tests.lab.in_process import CLIENTS, SUBJECTS, WORKLOADS, crowd, side

TinyModel = Callable[..., Path]
SHORT = {name: each for name, each in WORKLOADS.items() if each.start is not long_prompt}
RAW = {each.name: each for each in map(raw, SHORT.values()) if not each.template}
EVERY = SHORT | RAW
TELLING = ("thinking stripped", "four users", "shared system prompt", "raw: few-shot", "raw: four users")
ON_BOTH_ENGINES = {
    *(("qwen35", name) for name in (*TELLING, "mid-generation")),
    *(("gemma3", name) for name in TELLING),
}
"""Runs that are repeated on the patched engine."""


def case(arch: str, workload: str) -> Any:
    """All workloads on qwen35, the telling ones on gemma3, llama and mamba; the rest in the full suite."""
    marks = []
    if (arch, workload) in ON_BOTH_ENGINES:
        marks = [pytest.mark.patched]
    elif workload in RAW if arch == "qwen35" else arch not in ("gemma3", "llama", "mamba"):
        marks = [pytest.mark.full]
    return pytest.param(arch, workload, marks=marks)


@pytest.mark.parametrize(
    ("arch", "workload"),
    [
        *(case("qwen35", workload) for workload in EVERY),
        *(case(arch, workload) for arch in SUBJECTS if arch != "qwen35" for workload in TELLING),
    ],
)
def test_decoded_tokens_stay_within_the_promised_bound(
    tiny_model: TinyModel, arch: str, workload: str
) -> None:
    subject = SUBJECTS[arch]
    model = tiny_model(subject.arch, **subject.making)
    found = side(model, with_costs, EVERY[workload], **subject.options)
    assert found.ratio <= EVERY[workload].bound, found.account()
    for record in found.records:  # the reports agree with the counters
        assert record.report is not None
        assert (record.report.total, record.report.cached) == (len(record.prompt), record.cached)
        assert record.usage_cached in (None, record.cached)


@pytest.mark.parametrize(
    ("arch", "workload"),
    [
        pytest.param(arch, name, marks=() if arch == "qwen35" and name in TELLING else pytest.mark.full)
        for arch in ("qwen35", "mamba2")
        for name in SHORT
        if name != "mid-generation"
    ],
)
def test_bounds_hold_where_saving_costs_as_much_as_decoding(
    tiny_model: TinyModel, arch: str, workload: str
) -> None:
    found = side(tiny_model(arch), partial(with_costs, DEAR), WORKLOADS[workload])
    assert found.ratio <= WORKLOADS[workload].bound, found.account()


def test_followup_of_ollama_pr_15914_reuses_its_96_tokens(tiny_model: TinyModel) -> None:
    found = side(tiny_model("qwen35"), Llama, WORKLOADS["long answer, follow-up"])
    report = found.records[-1].report
    assert report is not None
    assert (report.total, report.matched) == (430, 96)
    assert report.cached >= 94


def test_repeated_prompt_of_49623_tokens_is_reused(tiny_model: TinyModel) -> None:
    model = tiny_model("mamba2", layers=2, context=65536)
    found = side(model, Llama, WORKLOADS["prompt of 49,623 tokens"])
    _, again, _ = found.records
    assert again.cached >= len(again.prompt) - 4
    assert found.ratio <= 2.0, found.account()


@pytest.mark.parametrize("workload", ["thinking stripped", "regenerate x 6"])
def test_plain_attention_needs_no_checkpoints(tiny_model: TinyModel, workload: str) -> None:
    found = side(tiny_model("llama"), Llama, WORKLOADS[workload])
    assert [r.report.checkpoints for r in found.records if r.report] == [0] * len(found.records)
    assert found.decoded - found.least <= len(found.measured), found.account()  # one token to sample from


@pytest.mark.parametrize(
    ("arch", "workload"),
    [
        pytest.param("qwen35", "thinking stripped", marks=pytest.mark.patched),
        *(
            pytest.param(arch, workload, marks=pytest.mark.full)
            for arch, workload in (
                ("qwen35", "chat: regenerate x 6"),
                ("qwen35", "few-shot"),
                ("jamba", "thinking stripped"),
                ("mamba", "few-shot"),
            )
        ),
    ],
)
def test_four_clients_at_once_decode_hardly_more_than_necessary(
    tiny_model: TinyModel, arch: str, workload: str
) -> None:
    subject = SUBJECTS[arch]
    found = crowd(tiny_model(arch, **subject.making), WORKLOADS[workload], **subject.options)
    assert found.ratio <= 1.05, found.account()
    assert len(found.records) >= 28


def test_four_clients_with_one_prompt_decode_it_once(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen35")
    found = crowd(model, WORKLOADS["few-shot"], same=True)
    assert found.ratio <= 1.05, found.account()
    assert sum(least_decodes(found.records)) < CLIENTS * len(found.records[0].prompt)
    without_paging = crowd(model, WORKLOADS["few-shot"], same=True, paging=False)
    assert without_paging.ratio > 1.05, "prompts that are decoded twice are noticed"
