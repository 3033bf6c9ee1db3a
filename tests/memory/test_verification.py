"""Whether memory is what its sequence says: what shows in positions, and what only in sizes."""

import pytest

from llamahybrid.memory.restore import restore

from .conftest import PROMPT, ids, new


@pytest.mark.parametrize("arch", ["qwen35", "llama", "mamba", "gemma3"])
def test_a_sound_sequence_has_no_fault(open_model, arch):
    llm = open_model(arch, n_ctx=256)
    llm.eval(PROMPT)
    live = llm.runner.live
    assert live.fault() is None
    assert live.state.holds(ids(PROMPT))
    assert not live.touched_outside()


def test_an_empty_sequence_has_no_fault(live):
    live.empty()
    assert live.fault() is None


def test_a_hole_in_attention_shows_in_the_size(llm, live, lose_cells):
    lose_cells(llm.ctx, 2, 5)
    assert live.fault(deep=False) is None
    assert "bytes" in live.fault()


def test_wrong_positions_are_a_fault_though_the_size_is_right(live, monkeypatch):
    monkeypatch.setattr(live.native, "positions", lambda: (5, 5))
    assert "position" in live.fault()
    assert not live.learn_size_rule()
    assert live.profile.linear


def test_what_is_not_known_is_never_sound_whatever_memory_says(llm):
    llm.eval([5])
    live = llm.runner.live
    live.invalidate()
    assert live.fault() is not None
    for spoil in (live.require_zeroing, live.invalidate_tip):
        spoil()
        assert live.state.is_invalid
        assert live.n == 1


@pytest.mark.parametrize("restored", [False, True])
def test_only_a_sequence_that_grew_by_itself_refutes_the_size_rule(llm, live, monkeypatch, restored):
    if restored:
        record = live.snapshot(new)
        llm.eval([3, 4])
        assert restore(live, record, ids(PROMPT)) is None
    size = live.native.state_size
    monkeypatch.setattr(live.native, "state_size", lambda partial: size(partial=partial) + (not partial))
    assert live.learn_size_rule() is not restored
    assert live.profile.linear is restored
    assert (live.fault() is None) is not restored
