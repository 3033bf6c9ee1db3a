"""What is saved before a batch that may be stopped inside; that it is undone: see test_cancel."""

import pytest

from llamahybrid.request.boundaries import Boundaries
from tests.conftest import take

ONE = [(7 * i + 1) % 200 for i in range(120)]
TWO = [(11 * i + 5) % 200 for i in range(160)]


def test_the_copy_before_a_batch_always_goes_into_the_same_memory(open_unmeasured):
    buffer = open_unmeasured().runner._batches._buffer
    first = buffer(10)
    assert buffer(10) is first
    assert buffer(20).nbytes == 20


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
