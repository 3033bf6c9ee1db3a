"""Rollback planes on the patched engine: there while drafts need them, gone with all their bytes after."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from llamahybrid.capi.shim import library
from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.restore import restore
from llamahybrid.prompt_cache.base import Costs
from tests.memory.conftest import decode, ids, new

from .conftest import PROMPT, take

pytestmark = [
    pytest.mark.patched,
    pytest.mark.skipif(
        "llama_set_n_rs_seq" not in library().optional, reason="this library cannot resize rollback planes"
    ),
]


@pytest.fixture
def drafted(drafting, fresh):
    """A `Llama` that buys planes for its drafts, the text it drafts, and how many planes it had at most."""

    def opener(arch="qwen35", **more):
        text = [*PROMPT, *fresh(PROMPT, 60, arch)]
        llm = drafting(arch, text, buys=True, **more)
        planes, seen = llm.runner.live.planes, []
        grow = planes.grow
        planes.grow = lambda count: (grow(count), seen.append(planes.count))[0]
        return llm, text, seen

    return opener


@pytest.mark.parametrize(
    "arch",
    ["qwen35", *(pytest.param(arch, marks=pytest.mark.full) for arch in ("lfm2", "nemotron_h", "glm5-next"))],
)
def test_memory_is_as_large_after_a_request_as_before(drafted, arch):
    llm, text, seen = drafted(arch)
    live = llm.runner.live
    before = live.native.memory_bytes()
    for _ in range(3):
        assert take(llm, PROMPT) == text[80:120]
        assert max(seen) > 0
        assert live.planes.count == 0
        assert live.native.memory_bytes() == before
    assert llm.last_request.rollbacks["planes"] > 0


def test_memory_comes_back_from_a_generator_that_is_closed_half_way(drafted):
    llm, _, seen = drafted()
    before = llm.runner.live.native.memory_bytes()
    stream = llm.generate(PROMPT, temp=0.0)
    while not seen or not llm.runner.live.planes.in_use:
        next(stream)
    assert llm.runner.live.native.memory_bytes() > before
    stream.close()
    assert llm.runner.live.native.memory_bytes() == before


def test_memory_comes_back_after_an_exception_and_a_cancel(drafted):
    llm, text, seen = drafted()
    before = llm.runner.live.native.memory_bytes()

    def boom(ids, scores):
        if seen and llm.runner.live.planes.grown:
            raise RuntimeError("boom")
        return False

    with pytest.raises(RuntimeError, match="boom"):
        take(llm, PROMPT, stopping_criteria=boom)
    assert llm.runner.live.native.memory_bytes() == before
    stream = llm.generate(PROMPT, temp=0.0)
    while not llm.runner.live.planes.grown:
        next(stream)
    llm.cancel()
    with pytest.raises(LlamaHybridError):
        list(stream)
    assert llm.runner.live.native.memory_bytes() == before
    assert take(llm, PROMPT) == text[80:120]


def test_planes_go_before_a_checkpoint_in_the_middle_of_an_answer(drafted, monkeypatch):
    dear = Costs(token_seconds=1e-3, prefill_seconds=1e-3, snapshot_seconds=1e-3, restore_seconds=1e-3)
    monkeypatch.setattr(CostMeter, "costs", lambda meter: dear)  # a checkpoint every 64 tokens
    llm, _, seen = drafted()
    live, saved = llm.runner.live, []
    save = live.native.save_partial
    monkeypatch.setattr(
        live.native, "save_partial", lambda out: (saved.append(live.planes.count), save(out))[1]
    )
    stream = llm.generate(PROMPT, temp=0.0)
    while live.n < 160:
        next(stream)
    stream.close()
    assert max(seen) > 0
    assert len(saved) > 2
    assert set(saved) == {0}


def grown(open_model):
    live = open_model().runner.live
    decode(live, PROMPT[:12])
    assert live.planes.grow(4)
    decode(live, PROMPT[12:18])
    return live


def test_planes_go_before_a_snapshot_is_taken(open_model):
    live = grown(open_model)
    record = live.snapshot(new)
    assert live.planes.count == 0
    decode(live, PROMPT[18:20])
    assert live.planes.grow(4)
    assert restore(live, record, ids(PROMPT[:18])) is None
    assert live.planes.count == 0


def test_planes_go_before_attention_is_paged_out(open_model):
    live = grown(open_model)
    assert live.page_out(0, 18, new) is not None
    assert live.planes.count == 0


def test_a_rollback_is_carried_out_when_planes_go(open_model, logits_of):
    live = grown(open_model)
    assert live.cut(15)
    live.release_planes()
    assert (live.planes.count, live.planes.pending) == (0, False)
    apart = np.abs(decode(live, [5]) - logits_of([*PROMPT[:15], 5])).max()
    assert apart < 1e-3


def test_where_planes_cannot_be_made_snapshots_do(drafted, monkeypatch):
    llm, text, _ = drafted()
    monkeypatch.setattr(llm.runner.live.native, "resize_planes", lambda count: False)
    assert take(llm, PROMPT) == text[80:120]
    assert set(llm.last_request.rollbacks) == {"snapshot"}


def test_memory_that_does_not_come_back_is_told(open_model, monkeypatch, caplog):
    live = grown(open_model)
    kept = live.native.memory_bytes()
    monkeypatch.setattr(live.native, "memory_bytes", lambda: kept)
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        live.planes.shrink()
    assert "could not be given back" in caplog.text
