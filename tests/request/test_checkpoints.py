"""What is taken from the live sequence and handed to the cache, and what is not."""

import threading
import time

import pytest

from llamahybrid.errors import RequestCancelled
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.request.cells import Cells
from tests.conftest import take

ONE = [(7 * i + 1) % 200 for i in range(120)]
TWO = [(11 * i + 5) % 200 for i in range(160)]


def test_what_a_cancelled_prompt_had_staged_is_stored(open_unmeasured, monkeypatch):
    llm = open_unmeasured()
    stage = llm.runner.checkpoints.stage
    monkeypatch.setattr(llm.runner.checkpoints, "stage", lambda turn: stage(turn) or llm.cancel())
    with pytest.raises(RequestCancelled):
        take(llm, ONE, 1)
    assert llm.last_request.checkpoints == llm.prompt_cache.stats().entries == 1


def test_what_does_not_fit_is_not_counted(open_unmeasured):
    llm = open_unmeasured()
    llm.prompt_cache.ram_bytes = 0
    take(llm, ONE, 3)
    assert llm.last_request.checkpoints == 0


def test_attention_is_stored_once_a_request_is_over(open_unmeasured):
    llm = open_unmeasured()
    take(llm, ONE, 1)
    assert llm.prompt_cache.stats().segments > 0


def missing(llm, slot):
    return llm.prompt_cache.missing(slot.evaluation.runner.checkpoints.view())


@pytest.fixture
def beside(open_slots):
    """`beside(**options)`: a model on which an answer is open, what one said that ended beside it, where."""

    def make(**options):
        llm = open_slots("qwen35", 2, flash_attn=True, **options)
        stream = llm.generate(TWO, temp=0.0)
        next(stream)
        said = take(llm, ONE, 3)
        return llm, stream, said, next(s for s in llm.slots.all if llm.slots.user(s) is None)

    return make


def test_attention_is_stored_when_nobody_waits_any_more(beside):
    llm, stream, _, slot = beside()
    assert missing(llm, slot)
    stream.close()
    assert not any(missing(llm, slot) for slot in llm.slots.all)


def test_attention_is_stored_when_another_chat_gets_its_slot(beside, open_slots):
    llm, stream, said, _ = beside()
    take(llm, [(13 * i + 2) % 200 for i in range(150)], 2)
    again = take(llm, [*ONE, *said[:2], 3], 3)
    assert llm.last_request.cached >= len(ONE) + 2 - 1
    assert llm.last_request.source != "live"
    stream.close()
    assert again == take(open_slots("qwen35", 2, flash_attn=True), [*ONE, *said[:2], 3], 3)


def test_attention_is_not_stored_while_another_answer_goes_on(beside):
    llm, stream, _, slot = beside()
    take(llm, [*ONE, 5], 2)
    assert missing(llm, slot)
    stream.close()


def test_another_model_of_the_same_cache_finds_it_at_once(beside, open_slots):
    cache = PromptCache(1 << 26)
    other = open_slots("qwen35", 2, flash_attn=True, prompt_cache=cache)
    _, stream, said, _ = beside(prompt_cache=cache)
    take(other, [*ONE, *said[:2], 3], 2)
    assert other.last_request.cached >= len(ONE)
    stream.close()


def test_who_ends_last_does_not_hear_of_attention_that_cannot_be_stored(beside, monkeypatch):
    llm, stream, _, slot = beside()
    owing = slot.evaluation.runner

    def fail():
        raise MemoryError("no room for it")

    monkeypatch.setattr(owing, "store_attention", fail)
    llm.cancel()
    with pytest.raises(RequestCancelled):
        next(stream)
    assert not llm._gate.seated
    assert not owing.checkpoints.owes_attention, "it is not tried each time"


def test_nothing_is_stored_outside_a_step(open_slots, monkeypatch):
    """Where a model is being closed, what is left of a parked request is ended while another one decodes."""
    llm = open_slots("qwen35", 2, flash_attn=True)
    parked, other, runs = (llm.generate([(n * i + 2) % 200 for i in range(150)], temp=0.0) for n in (3, 5, 7))
    for stream in (parked, other, runs):
        next(stream)
    other.close()
    take(llm, ONE, 3)
    owing = next(r for r in llm.slots.runners if r.checkpoints.owes_attention)
    stored, decodes, goes_on = [], threading.Event(), threading.Event()
    monkeypatch.setattr(owing, "store_attention", lambda: stored.append(llm._gate.held()))
    decode = LiveSequence._decode

    def slow(self, *args):
        decodes.set()
        goes_on.wait(20)
        decode(self, *args)

    monkeypatch.setattr(LiveSequence, "_decode", slow)
    monkeypatch.setattr(Cells, "quiet", True)
    threads = [threading.Thread(target=next, args=(runs, None)), threading.Thread(target=llm.close)]
    threads[0].start()
    assert decodes.wait(20)
    threads[1].start()
    while not llm._gate.closed:
        time.sleep(0.01)
    parked.close()
    assert not stored
    goes_on.set()
    for thread in threads:
        thread.join(20)
    assert all(stored)


def test_before_it_goes_it_is_looked_at_deeply(beside, monkeypatch):
    """Nobody has since it was decoded; what is stored at once is looked at so, too."""
    llm, stream, _, slot = beside()
    looks, page_out = [], LiveSequence.page_out

    def noted(self, start, end, buffer, *, deep=True):
        looks.append(deep)
        return page_out(self, start, end, buffer, deep=deep)

    monkeypatch.setattr(LiveSequence, "page_out", noted)
    slot.evaluation.runner.save_tip()
    assert looks == [True]
    assert not missing(llm, slot)
    stream.close()


def test_attention_that_is_to_outlive_the_process_is_stored_at_once(beside, tmp_path):
    llm, stream, _, slot = beside(prompt_cache=PromptCache(1 << 26, tmp_path))
    assert not missing(llm, slot)
    stream.close()


def test_a_repeated_prompt_is_not_stored_again(open_unmeasured):
    llm = open_unmeasured()
    for _ in range(2):
        take(llm, ONE, 1)
    assert llm.last_request.cached == len(ONE)
    assert llm.last_request.checkpoints == 0


@pytest.mark.parametrize("spoil", ["invalidate", "opaque", "empty"])
def test_nothing_is_stored_of_what_is_not_known(open_unmeasured, spoil):
    llm = open_unmeasured()
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
def test_a_request_goes_on_where_nothing_can_be_saved(open_unmeasured, monkeypatch, name):
    llm, fresh = open_unmeasured(), open_unmeasured()
    monkeypatch.setattr(llm.runner.live, name, lambda *_, **__: None)
    assert take(llm, TWO, 5) == take(fresh, TWO, 5)
    assert take(llm, [*TWO, 3], 5) == take(fresh, [*TWO, 3], 5)


def test_a_checkpoint_of_tokens_that_are_gone_is_not_stored(open_unmeasured):
    llm = open_unmeasured()
    take(llm, ONE, 1)
    runner, stored = llm.runner, llm.prompt_cache.stats().entries
    runner.checkpoints.stage(llm.requests.last)
    runner.live.empty()
    runner.checkpoints.admit_staged(llm.requests.last)
    assert llm.prompt_cache.stats().entries == stored
    assert llm.requests.last.staged == []
