"""What is taken from the live sequence and handed to the cache, and what is not."""

import itertools

import pytest

from llamahybrid import Llama
from llamahybrid.errors import RequestCancelled
from llamahybrid.prompt_cache import Costs

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


def test_what_a_cancelled_prompt_had_staged_is_stored(open_model, monkeypatch):
    llm = open_model()
    stage = llm.runner.checkpoints.stage
    monkeypatch.setattr(llm.runner.checkpoints, "stage", lambda turn: stage(turn) or llm.cancel())
    with pytest.raises(RequestCancelled):
        take(llm, ONE)
    assert llm.last_request.checkpoints == llm.prompt_cache.stats().entries == 1


def test_what_does_not_fit_is_not_counted(open_model):
    llm = open_model()
    llm.prompt_cache.ram_bytes = 0
    take(llm, ONE, 3)
    assert llm.last_request.checkpoints == 0


def test_attention_is_stored_once_a_request_is_over(open_model):
    llm = open_model()
    take(llm, ONE)
    assert llm.prompt_cache.stats().segments > 0


def test_a_repeated_prompt_is_not_stored_again(open_model):
    llm = open_model()
    for _ in range(2):
        take(llm, ONE)
    assert llm.last_request.cached == len(ONE)
    assert llm.last_request.checkpoints == 0


@pytest.mark.parametrize("spoil", ["invalidate", "opaque", "empty"])
def test_nothing_is_stored_of_what_is_not_known(open_model, spoil):
    llm = open_model()
    stream = llm.generate(ONE, temp=0.0)
    for _ in range(20):
        next(stream)
    live = llm.runner.live
    before = llm.prompt_cache.stats()
    if spoil == "opaque":
        live.state.ids[100] = -5
    else:
        getattr(live, spoil)()
    llm.runner.save_tip()
    stream.close()
    after = llm.prompt_cache.stats()
    assert (after.entries, after.segments, after.extra["tokens"]) == (
        before.entries,
        before.segments,
        before.extra["tokens"],
    )


@pytest.mark.parametrize("name", ["snapshot", "page_out"])
def test_a_request_goes_on_where_nothing_can_be_saved(open_model, monkeypatch, name):
    llm, fresh = open_model(), open_model()
    monkeypatch.setattr(llm.runner.live, name, lambda *_, **__: None)
    assert take(llm, TWO, 5) == take(fresh, TWO, 5)
    assert take(llm, [*TWO, 3], 5) == take(fresh, [*TWO, 3], 5)


def test_a_checkpoint_of_tokens_that_are_gone_is_not_stored(open_model):
    llm = open_model()
    take(llm, ONE)
    runner, stored = llm.runner, llm.prompt_cache.stats().entries
    runner.checkpoints.stage(llm.requests.last)
    runner.live.empty()
    runner.checkpoints.admit_staged(llm.requests.last)
    assert llm.prompt_cache.stats().entries == stored
    assert llm.requests.last.staged == []
