"""The ledger of rollback planes: a cut goes back by a plane only if that holds this very history."""

from __future__ import annotations

import pytest

from llamahybrid.memory.restore import adopt_tokens
from tests.lab.reference import difference

from .conftest import PROMPT, decode, foreign_decode, ids

pytestmark = [pytest.mark.patched]

PLANES = 4
ROLLBACK = (
    "qwen35",
    pytest.param("lfm2", marks=pytest.mark.full),
    pytest.param("nemotron_h", marks=pytest.mark.full),
)
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


def test_there_is_no_second_way_back(live, logits_of):
    decode(live, PROMPT[:12])
    assert live.cut(10)
    assert not live.cut(9)
    decode(live, [7])
    assert not live.cut(9)
    continues(live, [*PROMPT[:10], 7], logits_of)


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
    foreign_decode(llm, [9], 12)
    assert not live.cut(10)


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


def test_there_is_no_way_back_behind_a_whole_state_that_was_loaded(live, logits_of):
    decode(live, PROMPT[:12])
    assert adopt_tokens(live, ids(PROMPT[:12])) is None
    assert not live.cut(10)
    continues(live, PROMPT[:12], logits_of)


@pytest.mark.parametrize("planes", [0, 4, 30])
@pytest.mark.parametrize("arch", ["qwen35", "deepseek4"])
def test_planes_are_not_mistaken_for_memory_that_can_be_cut(open_model, arch, planes):
    llm = open_model(arch, draft_planes=planes)
    assert not llm.runner.live.profile.cuttable
    assert llm.runner.live.planes.count == planes
