"""What is saved before a batch that may be stopped inside; that it is undone: see test_cancel."""

import itertools

import pytest

from llamahybrid import Llama
from llamahybrid.prompt_cache import Costs
from llamahybrid.request.boundaries import Boundaries

ONE = [(7 * i + 1) % 200 for i in range(120)]
TWO = [(11 * i + 5) % 200 for i in range(160)]


def take(llm, prompt, n=1):
    return list(itertools.islice(llm.generate(prompt, temp=0.0), n))


@pytest.fixture
def open_model(tiny_model, monkeypatch):
    made = []

    def opener(arch="qwen35", **more):
        made.append(Llama(str(tiny_model(arch)), n_ctx=512, n_threads=1, verbose=False, n_batch=32, **more))
        monkeypatch.setattr(made[-1].runner.meter, "costs", Costs)  # no checkpoint because it is cheap here
        return made[-1]

    yield opener
    for llm in made:
        llm.close()


def test_the_copy_before_a_batch_always_goes_into_the_same_memory(open_model):
    buffer = open_model().runner._batches._buffer
    first = buffer(10)
    assert buffer(10) is first
    assert buffer(20).nbytes == 20


def test_memory_that_can_be_cut_is_not_copied_before_each_batch(open_model, monkeypatch):
    llm = open_model("llama")
    monkeypatch.setattr(llm.runner.live, "snapshot", lambda _: pytest.fail("it was copied"))
    monkeypatch.setattr(Boundaries, "find", lambda *_: pytest.fail("nothing is cut there"))
    assert len(take(llm, TWO, 3)) == 3


def test_memory_is_not_copied_before_a_single_token(open_model, monkeypatch):
    llm = open_model()
    take(llm, ONE)
    monkeypatch.setattr(llm.runner.live, "snapshot", lambda *_, **__: pytest.fail("it was copied"))
    llm.eval([5])
    assert llm.n_tokens == len(ONE) + 1
