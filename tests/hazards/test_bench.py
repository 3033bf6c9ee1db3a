"""The bench that probes work at: what is compared, what is asked of a model, and how a decode is stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llamahybrid.capi.gguf import quiet
from llamahybrid.hazards.bench import ABORTED, Bench, Context, Gap, gap, lib, memory_left
from llamahybrid.hazards.probe import NotApplicable


@pytest.fixture
def bench(tiny_model: Callable[..., Path]) -> Iterator[Callable[[str], Bench]]:
    """`bench(arch)`: a bench for a tiny model, gone after the test, as is its way with the library's log."""
    made: list[Bench] = []

    def make(arch: str) -> Bench:
        made.append(Bench(str(tiny_model(arch))))
        return made[-1]

    with quiet():
        yield make
        for each in made:
            lib.llama_model_free(each.model)


def test_a_gap_is_judged_by_the_range_of_a_clean_row() -> None:
    row = np.array([0, 100], np.float32)
    assert gap(row + np.float32(0.005), row).exact
    assert not gap(row + np.float32(0.05), row).exact
    lost = gap(np.array([0, np.nan], np.float32), row)
    assert (lost.exact, lost.finite, lost.reported) == (False, False, None)
    with pytest.raises(NotApplicable):
        gap(row, np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("arch", "refused"),
    [
        ("qwen35", {"window", "other positions"}),
        ("mamba", {"hybrid", "attention", "window", "planes", "M-RoPE"}),
        ("llama", {"hybrid", "recurrent", "window", "planes", "M-RoPE"}),
        ("gemma3", {"hybrid", "recurrent", "planes", "M-RoPE"}),
        ("jamba", {"window", "planes", "M-RoPE"}),
        ("qwen4exp", {"window", "other positions", "shared tokens"}),
        ("bert", {"hybrid", "recurrent", "window", "planes", "M-RoPE", "memory"}),
    ],
)
def test_what_cannot_happen_with_a_model_is_not_applicable(
    bench: Callable[[str], Bench], arch: str, refused: set[str]
) -> None:
    model = bench(arch)
    needs: dict[str, Callable[[], object]] = {
        "hybrid": model.need_hybrid,
        "recurrent": model.need_recurrent,
        "attention": model.need_attention,
        "window": model.need_window,
        "M-RoPE": lambda: model.need_multi_rope(True),
        "other positions": lambda: model.need_multi_rope(False),
        "planes": lambda: freed(model.with_planes(2)),
        "shared tokens": model.need_shared_tokens,
        "memory": lambda: freed(model.context()),
    }
    found = set()
    for name, need in needs.items():
        try:
            need()
        except NotApplicable:
            found.add(name)
    assert found == refused


def freed(context: Context) -> None:
    lib.llama_free(context.ctx)


def test_what_goes_on_is_compared_with_a_run_that_saw_nothing_else(bench: Callable[[str], Bench]) -> None:
    model = bench("jamba")
    context = model.context().grown(8)
    found = context.goes_on(8)
    assert isinstance(found, Gap)
    assert found.exact
    context.decode([(model.token(9, text=1), 9, (0,))])  # a token of another text
    found = context.goes_on(10)
    assert isinstance(found, Gap)
    assert not found.exact
    assert context.goes_on(30) == -1, "the status of a refused decode"
    assert context.rm(0, -1, -1)
    found = context.goes_on_after_refusal(11)
    assert isinstance(found, Gap)
    assert found.exact, "what was dropped is not missed"
    freed(context)


def test_a_decode_stops_at_the_poll_that_is_named(bench: Callable[[str], Bench]) -> None:
    context = bench("llama").context()
    once = context.polls_of(lambda: context.feed(0, 8))
    assert once > 1
    assert context.stopped(1, lambda: context.feed(8, 16)) == ABORTED
    assert context.polls == once + 1
    end = context.last() + 1
    assert context.stopped(once + 1, lambda: context.feed(end, end + 8)) == 0, "there is no such poll"
    freed(context)


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
def test_memory_runs_out_when_told_to_and_only_then() -> None:
    with memory_left(64 << 20), pytest.raises(MemoryError):
        np.empty(1 << 30, np.uint8)
    assert np.empty(1 << 30, np.uint8).nbytes == 1 << 30
