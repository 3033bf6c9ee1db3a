"""A cancelled request ends at once, leaves sound memory, and loses a batch at most."""

import contextvars
import threading
from contextlib import suppress

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.capi import shim
from llamahybrid.errors import DecodeError, RequestCancelled
from tests.lab.inside import waiting
from tests.lab.waiting import wait_until
from tests.request.asking import (
    ARCHS,
    CUTS,
    DEADLINE,
    WORDS,
    Batches,
    Started,
    begin,
    finish,
    in_thread,
    said,
    take,
)

PROMPT = WORDS[:150]
BATCH = 32

needs_shim = pytest.mark.skipif(not shim.available, reason="a batch ends from inside with the shim alone")


@pytest.fixture
def open_one(opened):
    """`open_one(arch, cls)`: a model that decodes prompts in small batches."""
    return lambda arch, cls=Llama, **more: opened(arch, cls, **{"n_batch": BATCH, "n_ubatch": BATCH, **more})


def cancelled_at(llm, number, prompt=PROMPT, cancel=None):
    """Cancel a prompt right before its native batch `number`; the sizes of its batches."""
    batches = Batches(llm)
    batches.before[number] = cancel or llm.cancel
    with pytest.raises(RequestCancelled):
        take(llm, prompt)
    batches.stop()
    return batches.sizes


def assert_goes_on_right(llm, right, at_least, prompt=PROMPT):
    """The same prompt again: only the rest is decoded, and the answer is a fresh context's."""
    assert take(llm, prompt) == right(prompt)
    assert llm.last_request.cached >= at_least


# -- a prompt --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "other"), [(0, False), (3, True)])
@pytest.mark.parametrize("arch", CUTS)
def test_cancelled_prompt_keeps_its_progress(open_one, stock, arch, number, other):
    llm = open_one(arch)
    done = sum(cancelled_at(llm, number, cancel=other and (lambda: in_thread(llm.cancel)))[:number])
    report = llm.last_request
    assert report.cancelled
    assert (report.left, report.unreached) == (150, 150 - report.decoded)
    assert_goes_on_right(llm, stock(arch), max(0, done - BATCH))
    assert not llm.last_request.cancelled
    assert (llm.last_request.decoded, llm.last_request.unreached) == (llm.last_request.left, 0)


@needs_shim
@pytest.mark.parametrize("arch", CUTS)
def test_running_batch_is_not_finished(open_one, arch):
    llm = open_one(arch)
    sizes = cancelled_at(llm, 2)
    assert len(sizes) == 3
    assert llm.last_request.decoded == llm.n_tokens == sum(sizes[:2])


@pytest.mark.parametrize("arch", ARCHS)
def test_cancelled_prompt_loses_nothing_that_was_known_before_it(open_one, stock, arch):
    llm = open_one(arch)
    take(llm, PROMPT)
    longer = [*PROMPT, *WORDS[200:290]]
    cancelled_at(llm, 1, longer)
    assert_goes_on_right(llm, stock(arch), len(PROMPT), longer)


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_checkpoints_of_a_cancelled_prompt_serve_one_that_parts_before_its_end(open_one, arch):
    llm = open_one(arch)
    cancelled_at(llm, 10, WORDS)
    take(llm, [*WORDS[:250], 5, 6, 7], 2)
    assert 0 < llm.last_request.cached <= 250


def test_cancelled_prompt_stores_no_checkpoint_over_lost_attention(open_one, stock, lose_cells):
    llm = open_one("qwen35")
    first, branch = WORDS, [*WORDS[:340], *WORDS[:280]]
    take(llm, first)
    batches = Batches(llm)
    batches.before[0] = lambda: lose_cells(llm.ctx, 3, 240)
    batches.before[8] = llm.cancel
    with suppress(RequestCancelled):
        take(llm, branch)
    batches.stop()
    assert_goes_on_right(llm, stock("qwen35"), 0, branch[:345])
    assert_goes_on_right(llm, stock("qwen35"), 0, branch)


@pytest.mark.parametrize("arch", ARCHS)
def test_cancelled_eval_raises(open_one, stock, arch):
    llm = open_one(arch)
    batches = Batches(llm)
    batches.before[2] = llm.cancel
    with pytest.raises(RequestCancelled):
        llm.eval(PROMPT)
    batches.stop()
    assert llm.n_tokens >= sum(batches.sizes[:2]) - BATCH
    assert_goes_on_right(llm, stock(arch), BATCH)


def test_eval_inside_a_cancelled_request_decodes_nothing(open_one):
    llm, decoded = open_one("qwen35"), []

    def process(_, scores):
        before = llm.n_tokens
        llm.cancel()
        with pytest.raises(RequestCancelled):
            llm.eval([5])
        decoded.append(llm.n_tokens - before)
        return scores

    with pytest.raises(RequestCancelled):
        list(llm.generate(PROMPT, logits_processor=llama_cpp.LogitsProcessorList([process])))
    assert decoded == [0]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_cancelled_in_its_prompt_has_no_text(open_one, stock, stream):
    llm = open_one("qwen35")
    batches = Batches(llm)
    batches.before[0] = llm.cancel
    made = llm.create_completion(PROMPT, max_tokens=20, stream=stream)
    made = list(made) if stream else made
    batches.stop()
    assert (said(made), finish(made)) == ("", "cancelled")
    assert_goes_on_right(llm, stock("qwen35"), 0)


@needs_shim
def test_foreign_abort_callback_is_no_cancel(open_one, stock):
    llm, polls = open_one("qwen35"), iter(range(10**6))
    take(llm, PROMPT[:60], 2)

    @llama_cpp.ggml_abort_callback
    def abort(_):
        return next(polls) >= 100

    llama_cpp.llama_set_abort_callback(llm.ctx, abort, None)
    with pytest.raises(DecodeError) as error:
        take(llm, PROMPT)
    assert error.value.code == 2
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)
    assert not llm.last_request.cancelled
    assert_goes_on_right(llm, stock("qwen35"), 60)


# -- an answer -------------------------------------------------------------------------------------


def cancelling(llm, after):
    """A logits processor that cancels once `after` tokens were sampled."""
    calls = iter(range(1000))

    def process(_, scores):
        if next(calls) == after:
            llm.cancel()
        return scores

    return llama_cpp.LogitsProcessorList([process])


@pytest.mark.parametrize("arch", ARCHS)
def test_cancel_between_two_tokens(open_one, stock, arch):
    llm, out = open_one(arch), []
    with pytest.raises(RequestCancelled):
        out.extend(llm.generate(PROMPT, temp=0.0, logits_processor=cancelling(llm, 4)))
    assert len(out) == 5
    assert llm.last_request.generated == 5
    assert_goes_on_right(llm, stock(arch), len(PROMPT) + 4, [*PROMPT, *out])


@pytest.mark.parametrize("arch", ARCHS)
def test_token_being_decoded_is_finished(open_one, stock, arch):
    llm = open_one(arch)
    stream, answer = begin(llm, PROMPT, 3)
    Batches(llm).before[0] = llm.cancel
    answer.append(next(stream))
    assert answer == stock(arch)(PROMPT, 4)
    with pytest.raises(RequestCancelled):
        next(stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_cancelled_completion_has_the_text_so_far(open_one, slots, stream):
    llm = open_one("qwen35", n_parallel=slots)
    whole = llm.create_completion(PROMPT, max_tokens=5, temperature=0.0)
    asked = {"max_tokens": 20, "temperature": 0.0, "stream": stream}
    made = llm.create_completion(PROMPT, logits_processor=cancelling(llm, 4), **asked)
    made = list(made) if stream else made
    assert (said(made), finish(made)) == (said(whole), "cancelled")
    assert whole["choices"][0]["finish_reason"] == "length"
    if stream:
        assert {chunk["choices"][0]["finish_reason"] for chunk in made[:-1]} == {None}
    else:
        assert made["usage"]["completion_tokens"] == 5
    messages, processor = [{"role": "user", "content": "hello"}], cancelling(llm, 2)
    assert (
        finish(llm.create_chat_completion(messages, stream=stream, logits_processor=processor)) == "cancelled"
    )


# -- whose cancel it is ----------------------------------------------------------------------------


def test_cancel_with_nothing_running_ends_nothing(open_one):
    llm = open_one("qwen35")
    with llm.request() as handle:
        llm.create_completion(WORDS[:60], max_tokens=3)
    for cancel in (llm.cancel, handle.cancel):
        cancel()
        assert len(take(llm, PROMPT)) == 8
    stream, _ = begin(llm, WORDS[60:120])
    handle.cancel()
    assert len([next(stream) for _ in range(5)]) == 5
    assert not llm.last_request.cancelled


@pytest.mark.parametrize("slots", [1, 2])
def test_handle_cancels_its_own_request_and_no_other(open_one, stock, slots):
    llm = open_one("qwen35", n_parallel=slots)
    with llm.request() as mine:
        stream = llm.create_completion(WORDS[:60], max_tokens=20, temperature=0.0, stream=True)
    with llm.request() as other:
        second = llm.generate(WORDS[20:90], temp=0.0)
    next(stream)
    answer = [next(second)]
    mine.cancel()
    assert finish(stream) == "cancelled"
    answer += [next(second) for _ in range(3)]
    assert answer == stock("qwen35")(WORDS[20:90], 4)
    llm.cancel(other)
    with pytest.raises(RequestCancelled):
        next(second)
    assert [r.cancelled for r in mine.reports] == [True]
    assert len(take(llm, WORDS[:30])) == 8


def test_cancelled_handle_cancels_later_requests_of_its_block(open_one):
    llm = open_one("qwen35")
    with llm.request() as handle:
        handle.cancel()
        answer = llm.create_completion(WORDS[:60], max_tokens=5)
    assert (said(answer), finish(answer)) == ("", "cancelled")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert llm.create_completion(WORDS[:60], max_tokens=5)["usage"]["completion_tokens"] == 5


def test_cancelled_handle_waits_for_no_running_batch(open_one):
    llm, go_on, waited = open_one("qwen35", n_parallel=2), threading.Event(), []
    batches = Batches(llm)
    batches.before[1] = lambda: waited.append(go_on.wait(DEADLINE))
    busy = Started(take, llm, PROMPT)
    wait_until(lambda: len(batches.sizes) == 2)
    try:
        with llm.request() as handle:
            handle.cancel()
            made = llm.create_completion(WORDS[100:150], max_tokens=5)
        assert (said(made), finish(made)) == ("", "cancelled")
        assert not waited, "the batch still runs"
    finally:
        go_on.set()
    assert len(busy.result()) == 8
    batches.stop()


# -- while it waits --------------------------------------------------------------------------------


def in_line(llm, ask, **options):
    """Ask in another thread, inside the block that this one is in; return it once its request waits."""
    thread = Started(contextvars.copy_context().run, ask, **options)
    wait_until(lambda: waiting(llm))
    return thread


@pytest.mark.parametrize("slots", [1, 2])
def test_completion_cancelled_while_it_waits_for_a_slot_says_so_at_once(open_one, patient, slots):
    llm = open_one("qwen35", n_parallel=slots)
    held = [in_thread(begin, llm, WORDS[i : i + 60])[0] for i in range(slots)]
    with llm.request() as handle:
        thread = in_line(llm, llm.create_completion, prompt=WORDS[100:150], max_tokens=5)
        handle.cancel()
    made = thread.result()
    assert (said(made), finish(made)) == ("", "cancelled")
    for stream in held:
        assert len([next(stream) for _ in range(3)]) == 3, "those were left alone"
        stream.close()


def test_completion_cancelled_while_it_is_set_aside_says_so(open_one):
    llm = open_one("qwen35")
    with llm.request() as handle:
        stream = llm.create_completion([*WORDS[:200]], max_tokens=20, temperature=0.0, stream=True)
    next(stream)
    next(llm.generate(WORDS[200:260], temp=0.0))
    llm.prompt_cache.clear()  # its state has to be decoded again
    handle.cancel()
    assert finish(stream) == "cancelled"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("deed", ["save", "load", "chat"])
def test_whole_request_cancelled_while_it_waits_ends_and_lets_others_in(
    open_one, stock, patient, slots, deed
):
    """The request needs every slot, and no later request gets one before."""
    llm, right, decoded = open_one("qwen35", n_parallel=slots), stock("qwen35"), []
    state = llm.save_state()

    def handler(llama, **_):
        decoded.append(llama.eval(WORDS[:20]))

    llm.chat_handler = handler
    held, answer = in_thread(begin, llm, WORDS[:60])
    deeds = {
        "save": llm.save_state,
        "load": lambda: llm.load_state(state),
        "chat": lambda: llm.create_chat_completion([{"role": "user", "content": "x"}]),
    }

    with llm.request() as handle:
        thread = in_line(llm, deeds[deed])
        handle.cancel()
    with pytest.raises(RequestCancelled):
        thread.result()
    assert decoded == []
    wait_until(lambda: not waiting(llm))
    answer += [next(held) for _ in range(3)]
    assert answer == right(WORDS[:60], 4)
    if slots == 1:
        held.close()
    assert take(llm, PROMPT) == right(PROMPT)
    held.close()
