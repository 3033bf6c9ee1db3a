"""The process in which a class is measured does not influence the measurement."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.targets import child as process
from llamahybrid.harness.targets import reference
from llamahybrid.harness.targets.child import Child
from tests.conftest import TinyModel
from tests.lab.waiting import wait_until

OPTIONS = {"n_threads": 1, "n_threads_batch": 1, "n_batch": 64, "seed": 7}


@pytest.fixture
def child() -> Iterator[Child]:
    one = Child()
    yield one
    one.close()


@pytest.mark.parametrize("n_bytes", [None, 0])
def test_llamahybrid_without_a_cache_has_no_salts(
    child: Child, n_bytes: int | None, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMAHYBRID_RAM", raising=False)
    if n_bytes is not None:
        monkeypatch.setenv("LLAMAHYBRID_RAM", str(n_bytes))
    about = child.open("ours", str(tiny_model("qwen35")), OPTIONS, 256, 1)
    assert about["salts"] is (n_bytes is None)


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_answers_that_are_not_compared_keep_no_logits(child: Child, tiny_model: TinyModel, kind: str) -> None:
    def kept() -> int:
        gc.collect()
        made = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, reference.__file__)])
        return sum(trace.size == 4 * child.llm.n_vocab() for trace in made.traces)

    tokens = tuple(range(5, 25))
    tracemalloc.start()
    try:
        child.open(kind, str(tiny_model("qwen35")), OPTIONS, 256, 1)
        child.ask(asdict(Request(2, tokens)))
        assert kept() == 1
        child.keep_no_rows()
        for _ in range(5):
            child.ask(asdict(Request(2, tokens)))
        assert kept() <= 1
    finally:
        tracemalloc.stop()


def test_reported_reuse_may_be_any_integer_type(child: Child, tiny_model: TinyModel) -> None:
    child.open("stock", str(tiny_model("qwen35")), OPTIONS, 256, 1)
    ask = asdict(Request(2, (5, 6, 7)))
    child.llm.last_request = SimpleNamespace(cached=np.int64(0))
    assert type(child.ask(ask)["reported"]) is int
    child.llm.last_request = SimpleNamespace(cached=1.5)
    with pytest.raises(TypeError):
        child.ask(ask)


def test_chat_decoded_ahead_of_its_reader_is_compared_by_its_first_row(
    child: Child, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter((False, True, False))

    def clock() -> float:
        if next(reads):  # the reader has the first token; the loop is decoding this token
            progress = child.llm.requests.inside.progress
            wait_until(lambda: progress.decoded > 0)
        return time.perf_counter()

    monkeypatch.setattr(process, "time", SimpleNamespace(perf_counter=clock))
    child.open("ours", str(tiny_model("qwen35")), OPTIONS, 512, 1)
    reply = child.ask(asdict(Request(8, messages=({"role": "user", "content": "a letter"},))))
    assert child.check(reply["extra"]["number"]) == ("same", "")


def test_session_reuses_nothing_of_an_earlier_session(
    child: Child, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LLAMAHYBRID_RAM` gives a program one cache: prompts of one probe would be hits in the next."""
    monkeypatch.setenv("LLAMAHYBRID_RAM", "16MiB")
    for _ in range(2):
        child.open("ours", str(tiny_model("qwen35")), OPTIONS, 256, 1)
        assert child.llm.prompt_cache.ram_bytes == 16 << 20
        assert child.ask(asdict(Request(2, tuple(range(5, 69)))))["reported"] == 0
