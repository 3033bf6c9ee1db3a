"""The ledger of rollback planes: a cut goes back by a plane only if that holds this very history."""

from __future__ import annotations

import ctypes

import pytest
from llama_cpp import llama_cpp as native

from llamahybrid.memory.adoption import adopt_tokens
from llamahybrid.memory.planes import Planes
from llamahybrid.memory.restore import restore
from tests.lab.reference import difference

from .conftest import PROMPT, decode, ids, new

PLANES = 4
ROLLBACK = ("qwen35", "lfm2", "nemotron_h")
EXACT = 1e-3


@pytest.fixture
def live(open_model):
    """A live sequence with planes."""
    return open_model(draft_planes=PLANES).runner.live


def continues(live, tokens: list[int], logits_of, arch: str = "qwen35") -> None:
    """The sequence is `tokens`, and goes on as a fresh one would."""
    assert live.tokens.tolist() == tokens
    assert difference(decode(live, [5]), logits_of([*tokens, 5], arch)) < EXACT


@pytest.mark.parametrize("arch", ROLLBACK)
@pytest.mark.parametrize("batch", [2, 4, 12])
def test_a_rollback_reaches_as_far_as_the_last_batch_wrote(open_model, logits_of, arch, batch):
    live = open_model(arch, draft_planes=PLANES).runner.live
    decode(live, PROMPT[:30])
    decode(live, PROMPT[30 : 30 + batch])
    depth = min(batch - 1, PLANES)
    assert not live.cut(live.n - depth - 1)
    assert live.cut(live.n - depth)
    continues(live, PROMPT[: 30 + batch - depth], logits_of, arch)


@pytest.mark.parametrize("arch", ROLLBACK)
def test_the_last_tokens_of_many_small_batches_are_within_reach(open_model, logits_of, arch):
    live = open_model(arch, draft_planes=PLANES, n_ubatch=16).runner.live
    decode(live, PROMPT[:33])  # ubatches of 16: the last token would be alone in its own
    assert live.cut(33 - PLANES)
    continues(live, PROMPT[: 33 - PLANES], logits_of, arch)


def test_there_is_no_way_back_into_tokens_decoded_one_by_one(live, logits_of):
    for token in PROMPT[:12]:
        decode(live, [token])
    assert not live.cut(11)
    continues(live, PROMPT[:12], logits_of)


def test_there_is_no_second_way_back(live, logits_of):
    decode(live, PROMPT[:12])
    assert live.cut(10)
    assert live.planes.reach == 0, "whatever the library would say"
    assert not live.cut(9)
    decode(live, [7])
    assert not live.cut(9)
    continues(live, [*PROMPT[:10], 7], logits_of)


def test_there_is_no_way_back_behind_a_restored_state(live, logits_of):
    decode(live, PROMPT[:12])
    record = live.snapshot(new)
    decode(live, PROMPT[12:20])
    assert restore(live, record, ids(PROMPT[:12])) is None
    assert not live.cut(10)
    continues(live, PROMPT[:12], logits_of)


def test_there_is_no_way_back_once_the_state_was_copied(open_model, logits_of):
    llm = open_model(draft_planes=PLANES)
    live = llm.runner.live
    decode(live, PROMPT[:12])
    llm._ctx.kv_cache_seq_cp(0, 1, -1, -1)
    assert not live.cut(10)
    llm._ctx.kv_cache_seq_rm(1, -1, -1)
    continues(live, PROMPT[:12], logits_of)


def test_there_is_no_way_back_after_others_decoded(open_model):
    llm = open_model(draft_planes=PLANES)
    live = llm.runner.live
    decode(live, PROMPT[:12])
    token = (ctypes.c_int32 * 1)(9)
    native.llama_decode(llm.ctx, native.llama_batch_get_one(token, 1))
    assert not live.cut(10)


def test_a_rollback_waits_until_the_next_batch(live):
    decode(live, PROMPT[:12])
    assert live.cut(9)
    assert live.planes.pending
    decode(live, PROMPT[9:12])
    assert not live.planes.pending
    assert live.planes.reach == 2


def test_a_rollback_that_waits_to_be_carried_out_survives_paging(live, logits_of):
    decode(live, PROMPT[:12])
    assert live.cut(9)
    assert live.page_out(0, 9, new) is not None
    continues(live, PROMPT[:9], logits_of)


def test_a_rollback_that_waits_survives_a_copy(open_model, logits_of):
    llm = open_model(draft_planes=PLANES)
    live = llm.runner.live
    decode(live, PROMPT[:12])
    assert live.cut(9)
    llm._ctx.kv_cache_seq_cp(0, 1, -1, -1)
    live.empty()
    llm._ctx.kv_cache_seq_cp(1, 0, -1, -1)
    llm._ctx.kv_cache_seq_rm(1, -1, -1)
    assert adopt_tokens(live, ids(PROMPT[:9])) is None
    continues(live, PROMPT[:9], logits_of)


def test_a_snapshot_of_a_rollback_that_waits_is_that_of_the_state(live, logits_of):
    decode(live, PROMPT[:12])
    assert live.cut(9)
    record = live.snapshot(new)
    decode(live, PROMPT[20:30])
    assert restore(live, record, ids(PROMPT[:9])) is None
    continues(live, PROMPT[:9], logits_of)


def test_there_is_no_way_back_behind_a_whole_state_that_was_loaded(live, logits_of):
    decode(live, PROMPT[:12])
    assert adopt_tokens(live, ids(PROMPT[:12])) is None
    assert not live.cut(10)
    continues(live, PROMPT[:12], logits_of)


def test_nothing_is_paged_out_while_a_draft_is_pending(live):
    decode(live, PROMPT[:12])
    live.planes.in_use = True
    assert live.page_out(0, 9, new) is None
    assert live.cut(9), "its rollback is still possible"


@pytest.mark.parametrize("planes", [0, 4, 10, 30])
@pytest.mark.parametrize("arch", ["qwen35", "jamba", "deepseek4"])
def test_planes_are_not_mistaken_for_memory_that_can_be_cut(open_model, arch, planes):
    llm = open_model(arch, draft_planes=planes)
    assert not llm.runner.live.profile.cuttable
    assert llm.runner.live.planes.count == (0 if arch == "jamba" else planes)


class Resizable:
    """A context whose planes take 100 bytes each, and that keeps `leaked` bytes for good."""

    resizes_planes = True
    count = 1
    leaked = 0

    def planes(self) -> int:
        return self.count

    def memory_bytes(self) -> int:
        return 100 * self.count + self.leaked

    def resize_planes(self, count: int) -> bool:
        self.count = count
        return True


def test_planes_grow_and_are_given_back(caplog):
    context = Resizable()
    planes = Planes(context)
    assert planes.grow(3)
    assert planes.grow(2)
    assert planes.count == context.count == 3, "there were enough"
    assert planes.grow(5)
    planes.wrote(4)
    assert planes.reach == 3
    planes.shrink()
    assert planes.count == context.count == planes.reach == 1
    planes.wrote(2)
    planes.rolled_back()
    assert planes.grow(3)
    assert (planes.reach, planes.pending) == (0, False), "the library has carried it out"
    planes.shrink()
    assert caplog.text == ""


def test_a_library_that_cannot_resize_them_is_not_asked():
    context = Resizable()
    context.resizes_planes = False
    context.resize_planes = lambda count: pytest.fail("it was asked")
    planes = Planes(context)
    assert not planes.grow(3)
    assert planes.grow(1)
    assert (planes.count, planes.grown) == (1, False)


def test_planes_that_stay_are_told(caplog):
    context = Resizable()
    planes = Planes(context)
    assert planes.grow(3)
    context.resize_planes = lambda count: False
    planes.shrink()
    assert "200 bytes" in caplog.text
    assert planes.count == 3


def test_what_leaks_is_measured_from_before_they_first_grew(caplog):
    context = Resizable()
    planes = Planes(context)
    assert planes.grow(3)
    assert planes.grow(5)
    context.leaked = 150
    planes.shrink()
    assert "150 bytes" in caplog.text


def test_no_rollback_waits_in_a_state_from_elsewhere():
    planes = Planes(Resizable())
    planes.wrote(3)
    planes.rolled_back()
    assert planes.pending
    planes.invalidate()
    assert not planes.pending
