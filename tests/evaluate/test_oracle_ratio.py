"""What llamahybrid decodes beyond the least possible, by the native counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid import Llama
from llamahybrid.evaluate.compare import WORKLOADS, Comparer, Side
from llamahybrid.evaluate.conversation import Record
from llamahybrid.evaluate.oracle import least_decodes
from llamahybrid.evaluate.workloads import long_prompt, raw
from tests.lab.real_costs import with_dear_snapshots, with_real_costs
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
ORDINARY = [name for name in WORKLOADS if name not in ("mid-generation", "prompt of 49,623 tokens")]
RAW = {w.name: w for w in map(raw, WORKLOADS.values()) if not w.template and w.start is not long_prompt}
EVERY = {**{n: w for n, w in WORKLOADS.items() if w.start is not long_prompt}, **RAW}
TELLING = ("thinking stripped", "four users", "shared system prompt", "raw: few-shot", "raw: four users")


def test_no_bound_was_loosened() -> None:
    assert {name: workload.bound for name, workload in WORKLOADS.items()} == PROMISED
    assert {w.bound for w in RAW.values() if w.name != "raw: mid-generation"} == {1.06}
    assert RAW["raw: mid-generation"].bound == 1.2


def ours(model: Path, workload: str) -> Side:
    return Comparer(model, ONE_THREAD).side(Llama, WORKLOADS[workload])


def promised(tiny_model: TinyModel, arch: str, workload: str) -> Side:
    subject = SUBJECTS[arch]
    return subject.comparer(tiny_model(subject.arch, **subject.making)).side(with_real_costs, EVERY[workload])


def account(side: Side) -> str:
    """Where the tokens went, request by request."""
    lines = (
        f"total {len(r.prompt)}, least {least}, decoded {r.decoded}, cached {r.cached}: {r.report}"
        for r, least in zip(side.records, least_decodes(side.records), strict=True)
    )
    return "\n".join(lines)


def matched(record: Record, least: int) -> int:
    return len(record.prompt) - (least - (len(record.generated) - 1))


@pytest.mark.parametrize("workload", EVERY)
def test_hardly_more_is_decoded_than_has_to_be(tiny_model: TinyModel, workload: str) -> None:
    side = promised(tiny_model, "qwen35", workload)
    assert side.ratio <= EVERY[workload].bound, account(side)


@pytest.mark.parametrize("workload", TELLING)
@pytest.mark.parametrize("arch", [arch for arch in SUBJECTS if arch != "qwen35"])
def test_that_holds_for_every_kind_of_memory(tiny_model: TinyModel, arch: str, workload: str) -> None:
    side = promised(tiny_model, arch, workload)
    assert side.ratio <= EVERY[workload].bound, account(side)


@pytest.mark.parametrize("workload", ORDINARY)
@pytest.mark.parametrize("arch", ["qwen35", "mamba2"])
def test_that_holds_where_saving_costs_as_much_as_decoding(
    tiny_model: TinyModel, arch: str, workload: str
) -> None:
    side = Comparer(tiny_model(arch), ONE_THREAD).side(with_dear_snapshots, WORKLOADS[workload])
    assert side.ratio <= WORKLOADS[workload].bound, account(side)


def test_the_five_turns_of_llama_cpp_pr_22534(tiny_model: TinyModel) -> None:
    side = ours(tiny_model("qwen35"), "five turns")
    for record, least in list(zip(side.records, least_decodes(side.records), strict=True))[1:]:
        assert record.cached >= matched(record, least) - 1, account(side)


def test_the_followup_of_ollama_pr_15914(tiny_model: TinyModel) -> None:
    report = ours(tiny_model("qwen35"), "long answer, follow-up").records[-1].report
    assert report is not None
    assert (report.total, report.matched) == (430, 96)
    assert report.cached >= 94


@pytest.mark.timeout(300)
def test_a_prompt_of_49623_tokens_again_and_varied(tiny_model: TinyModel) -> None:
    side = ours(tiny_model("mamba2", layers=2, context=65536), "prompt of 49,623 tokens")
    _, again, _ = side.records
    assert again.cached >= len(again.prompt) - 4
    assert side.ratio <= 2.0, account(side)


@pytest.mark.parametrize("workload", ["thinking stripped", "mid-generation", "regenerate x 6"])
def test_plain_attention_needs_no_checkpoints(tiny_model: TinyModel, workload: str) -> None:
    side = ours(tiny_model("llama"), workload)
    assert [r.report.checkpoints for r in side.records if r.report] == [0] * len(side.records)
    assert side.decoded - side.least <= len(side.measured), account(side)  # one token to sample from


@pytest.mark.parametrize("workload", ORDINARY)
def test_the_report_says_what_the_counters_say(tiny_model: TinyModel, workload: str) -> None:
    side = ours(tiny_model("qwen35"), workload)
    for record in side.records:
        assert record.report is not None
        assert (record.report.total, record.report.cached) == (len(record.prompt), record.cached)
        assert record.usage_cached in (None, record.cached)
