"""Tokens that llamahybrid decodes beyond the least possible number, by the native counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.tokens import long_prompt, raw
from tests.lab.costs import with_dear_snapshots, with_real_costs
from tests.lab.in_process import WORKLOADS, Comparer, Side
from tests.lab.parallel_oracle import play
from tests.lab.subjects import SUBJECTS

TinyModel = Callable[..., Path]
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}
PROMISED = {
    **dict.fromkeys(("exact append", "thinking stripped", "regenerate x 6", "edit a middle message"), 1.02),
    **dict.fromkeys(("agent loop", "tool calls and pages", "five turns", "long answer, follow-up"), 1.02),
    **dict.fromkeys(("four unrelated prompts", "chat: thinking stripped", "chat: regenerate x 6"), 1.02),
    **dict.fromkeys(("four users", "shared system prompt", "few-shot"), 1.02),
    **dict.fromkeys(("document questions", "two agents"), 1.02),
    "chat: edit a message": 1.02,
    "chat: tools and pages": 1.2,
    "mid-generation": 1.2,
    "prompt of 49,623 tokens": 2.0,
}
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


def test_promised_bounds_are_not_loosened() -> None:
    assert {name: workload.bound for name, workload in WORKLOADS.items()} == PROMISED
    assert {each.bound for each in RAW.values() if each.name != "raw: mid-generation"} == {1.06}
    assert RAW["raw: mid-generation"].bound == 1.2


def account(side: Side) -> str:
    """Decoded tokens request by request."""
    lines = (
        f"total {len(r.prompt)}, least {least}, decoded {r.decoded}, cached {r.cached}: {r.report}"
        for r, least in zip(side.records, least_decodes(side.records), strict=True)
    )
    return "\n".join(lines)


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
    comparer = subject.comparer(tiny_model(subject.arch, **subject.making))
    side = comparer.side(with_real_costs, EVERY[workload])
    assert side.ratio <= EVERY[workload].bound, account(side)
    for record in side.records:  # the reports agree with the counters
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
    side = Comparer(tiny_model(arch), ONE_THREAD).side(with_dear_snapshots, WORKLOADS[workload])
    assert side.ratio <= WORKLOADS[workload].bound, account(side)


def test_followup_of_ollama_pr_15914_reuses_its_96_tokens(tiny_model: TinyModel) -> None:
    side = Comparer(tiny_model("qwen35"), ONE_THREAD).side(Llama, WORKLOADS["long answer, follow-up"])
    report = side.records[-1].report
    assert report is not None
    assert (report.total, report.matched) == (430, 96)
    assert report.cached >= 94


def test_repeated_prompt_of_49623_tokens_is_reused(tiny_model: TinyModel) -> None:
    model = tiny_model("mamba2", layers=2, context=65536)
    side = Comparer(model, ONE_THREAD).side(Llama, WORKLOADS["prompt of 49,623 tokens"])
    _, again, _ = side.records
    assert again.cached >= len(again.prompt) - 4
    assert side.ratio <= 2.0, account(side)


@pytest.mark.parametrize("workload", ["thinking stripped", "regenerate x 6"])
def test_plain_attention_needs_no_checkpoints(tiny_model: TinyModel, workload: str) -> None:
    side = Comparer(tiny_model("llama"), ONE_THREAD).side(Llama, WORKLOADS[workload])
    assert [r.report.checkpoints for r in side.records if r.report] == [0] * len(side.records)
    assert side.decoded - side.least <= len(side.measured), account(side)  # one token to sample from


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
    crowd = play(tiny_model(arch, **subject.making), WORKLOADS[workload], **subject.options)
    assert crowd.ratio <= 1.05, crowd.account()
    assert len(crowd.asked) >= 28


def test_four_clients_with_one_prompt_decode_it_once(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen35")
    crowd = play(model, WORKLOADS["few-shot"], same=True)
    assert crowd.ratio <= 1.05, crowd.account()
    assert sum(crowd.least) < 4 * len(crowd.asked[0].record.prompt)
    without_paging = play(model, WORKLOADS["few-shot"], same=True, paging=False)
    assert without_paging.ratio > 1.05, "prompts that are decoded twice are noticed"
