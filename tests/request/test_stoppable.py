"""What is saved before a batch that may be stopped inside; that it is undone: see test_cancel."""

import pytest

from llamahybrid.request.boundaries import Boundaries
from tests.conftest import take

ONE = [(7 * i + 1) % 200 for i in range(120)]
TWO = [(11 * i + 5) % 200 for i in range(160)]


def test_the_copy_before_a_batch_goes_into_the_same_memory_for_all_slots(open_slots):
    llm = open_slots("qwen35", 3)
    for prompt in (ONE, TWO, ONE[::-1]):
        take(llm, prompt, 1)
    runners = [slot.evaluation.runner for slot in llm.slots.all]
    copies = [runner._batches._state(None) for runner in runners]
    assert [copy.nbytes for copy in copies] == [runners[0].live.snapshot_bytes()] * 3
    assert len({copy.ctypes.data for copy in copies}) == 1
    runners[1].live.shared.forget_undo()
    assert runners[0].live.shared._undo.nbytes == 0


def test_memory_that_can_be_cut_is_not_copied_before_each_batch(open_unmeasured, monkeypatch):
    llm = open_unmeasured("llama")
    monkeypatch.setattr(llm.runner.live, "snapshot", lambda _: pytest.fail("it was copied"))
    monkeypatch.setattr(Boundaries, "find", lambda *_: pytest.fail("nothing is cut there"))
    assert len(take(llm, TWO, 3)) == 3


def test_memory_is_not_copied_before_a_single_token(open_unmeasured, monkeypatch):
    llm = open_unmeasured()
    take(llm, ONE, 1)
    monkeypatch.setattr(llm.runner.live, "snapshot", lambda *_, **__: pytest.fail("it was copied"))
    llm.eval([5])
    assert llm.n_tokens == len(ONE) + 1
