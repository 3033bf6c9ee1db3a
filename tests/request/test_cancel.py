"""A cancelled or interrupted request ends at once, leaves sound memory, and loses a batch at most."""

import threading

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.capi import shim as native
from llamahybrid.errors import DecodeError, RequestCancelled
from llamahybrid.prompt_cache import Costs

PROMPT = [(7 * i + 3) % 200 for i in range(150)]
BATCH = 32
MODELS = {
    "qwen35": {},
    "jamba": {},
    "mamba": {},
    "lfm2": {},
    "gemma3": {"swa_full": False, "n_ubatch": BATCH},
    "llama": {},
}


@pytest.fixture(params=MODELS)
def llm(request, tiny_model):
    with_window = {"window": 16} if request.param == "gemma3" else {}
    model = tiny_model(request.param, **with_window)
    options = {"n_ctx": 512, "n_batch": BATCH, "n_threads": 1, "verbose": False, **MODELS[request.param]}
    made = Llama(str(model), **options)
    made.fresh = lambda kind=Llama: kind(str(model), **options)
    yield made
    made.close()


def at_batch(llm, monkeypatch, number, action):
    """Do something right before native batch `number` of the next prompt, once."""
    decode, live = llm.runner.live.decode, llm.runner.live
    batches = iter(range(1000))

    def hooked(tokens, outputs):
        if next(batches) == number:
            action()
        decode(tokens, outputs)

    monkeypatch.setattr(live, "decode", hooked)


def greedy(llm, prompt, n=8):
    out = []
    for token in llm.generate(prompt, temp=0.0):
        out.append(token)
        if len(out) == n:
            return out
    raise AssertionError("the model stopped by itself")


def assert_goes_on_right(llm, monkeypatch, at_least):
    """The same prompt again: only the rest is decoded, and the answer is a fresh context's."""
    monkeypatch.undo()
    again = greedy(llm, PROMPT)
    assert llm.last_request.cached >= at_least
    other = llm.fresh()
    assert again == greedy(other, PROMPT)
    assert np.allclose(llm.runner.live.row.logits(), other.runner.live.row.logits(), atol=1e-4)
    other.close()


def test_inside_a_batch_of_a_prompt(llm, monkeypatch):
    at_batch(llm, monkeypatch, 3, llm.cancel)
    with pytest.raises(RequestCancelled):
        greedy(llm, PROMPT)
    assert llm.last_request.cancelled
    assert_goes_on_right(llm, monkeypatch, 2 * BATCH)


@pytest.mark.skipif(not native.available, reason="needs the compiled shim")
@pytest.mark.parametrize("number", [3, 4, 5])
def test_the_batch_that_runs_is_not_finished(llm, monkeypatch, number):
    before = []

    def stop():
        before.append(llm.runner.live.n)
        llm.cancel()

    at_batch(llm, monkeypatch, min(number, 3 if llm.runner.live.profile.cuttable else 5), stop)
    with pytest.raises(RequestCancelled):
        greedy(llm, PROMPT)
    assert [llm.runner.live.n] == before
    assert before[0] > 0


@pytest.mark.parametrize("other", [DecodeError(-3, "failed"), KeyboardInterrupt()])
def test_what_else_ends_a_batch_is_not_taken_for_the_cancel_beside_it(llm, monkeypatch, other):
    def fail():
        llm.cancel()
        raise other

    at_batch(llm, monkeypatch, 2, fail)
    with pytest.raises(type(other)):
        greedy(llm, PROMPT)


def test_a_token_that_is_being_decoded_is_finished(llm, monkeypatch):
    stream = llm.generate(PROMPT, temp=0.0)
    for _ in range(3):
        next(stream)
    there = llm.runner.live.n
    at_batch(llm, monkeypatch, 0, llm.cancel)
    next(stream)
    assert llm.runner.live.n == there + 1
    with pytest.raises(RequestCancelled):
        next(stream)


def test_eval_inside_a_cancelled_request_decodes_nothing(llm):
    decoded = []

    def process(ids, scores):
        before = llm.n_tokens
        llm.cancel()
        with pytest.raises(RequestCancelled):
            llm.eval([5])
        decoded.append(llm.n_tokens - before)
        return scores

    with pytest.raises(RequestCancelled):
        list(llm.generate(PROMPT, logits_processor=llama_cpp.LogitsProcessorList([process])))
    assert decoded == [0]


def test_where_a_batch_cannot_be_stopped_inside_the_next_is_not_begun(llm, monkeypatch):
    begun = []

    def stop():
        begun.append(llm.runner.live.n)
        llm.cancel()

    monkeypatch.setattr(llm.requests.gate.seats.stop, "arm", lambda on: None)
    at_batch(llm, monkeypatch, 1, stop)
    with pytest.raises(RequestCancelled):
        greedy(llm, PROMPT)
    assert begun[0] < llm.runner.live.n <= begun[0] + BATCH


def test_inside_the_first_batch(llm, monkeypatch):
    at_batch(llm, monkeypatch, 0, llm.cancel)
    with pytest.raises(RequestCancelled):
        greedy(llm, PROMPT)
    assert_goes_on_right(llm, monkeypatch, 0)


def test_a_batch_that_is_not_the_last_ones_loses_nothing_before_it(llm, monkeypatch):
    greedy(llm, PROMPT)
    longer = PROMPT + [(5 * i + 1) % 200 for i in range(90)]
    at_batch(llm, monkeypatch, 1, llm.cancel)
    with pytest.raises(RequestCancelled):
        greedy(llm, longer)
    monkeypatch.undo()
    other = llm.fresh()
    assert greedy(llm, longer) == greedy(other, longer)
    assert llm.last_request.cached >= len(PROMPT)
    other.close()


def test_a_checkpoint_of_a_cancelled_prompt_rests_on_whole_attention(tiny_model, monkeypatch, lose_cells):
    llm, fresh = (
        Llama(str(tiny_model("qwen35")), n_ctx=1024, n_batch=BATCH, n_threads=1, verbose=False)
        for _ in range(2)
    )
    first = [(7 * i + 3) % 200 for i in range(600)]
    branch = first[:540] + [(5 * i + 1) % 200 for i in range(280)]
    monkeypatch.setattr(llm.runner.meter, "costs", lambda: Costs(batch_tokens=BATCH))  # cuts do not vary
    greedy(llm, first)  # its attention is stored, and no checkpoint at 540
    staged = []
    stage = llm.runner.checkpoints.stage

    def losing(turn):
        if not staged:
            stage(turn)
            staged.extend(turn.staged)
            llm.cancel()

    monkeypatch.setattr(llm.runner.checkpoints, "stage", losing)
    at_batch(llm, monkeypatch, 0, lambda: lose_cells(llm._ctx.ctx, 3, 440))
    with pytest.raises(RequestCancelled):
        greedy(llm, branch)
    assert [position for position, _ in staged] == [540], "nothing was at stake"
    monkeypatch.undo()
    assert greedy(llm, branch[:545]) == greedy(fresh, branch[:545])
    assert np.allclose(llm.runner.live.row.logits(), fresh.runner.live.row.logits(), atol=1e-4)
    llm.close()
    fresh.close()


def cancelling(llm, after):
    """A logits processor that cancels once `after` tokens were sampled."""
    calls = iter(range(1000))

    def process(ids, scores):
        if next(calls) == after:
            llm.cancel()
        return scores

    return llama_cpp.LogitsProcessorList([process])


def test_between_two_tokens(llm):
    out = []
    stream = llm.generate(PROMPT, temp=0.0, logits_processor=cancelling(llm, 4))
    with pytest.raises(RequestCancelled):
        out.extend(stream)
    assert len(out) == 5
    again = greedy(llm, PROMPT + out)
    assert llm.last_request.cached >= len(PROMPT) + 4
    other = llm.fresh()
    assert again == greedy(other, PROMPT + out)
    other.close()


def test_a_completion_gives_the_text_so_far(llm):
    whole = llm.create_completion(PROMPT, max_tokens=5, temperature=0.0)
    stopped = llm.create_completion(
        PROMPT, max_tokens=20, temperature=0.0, logits_processor=cancelling(llm, 4)
    )
    assert stopped["choices"][0]["finish_reason"] == "cancelled"
    assert stopped["choices"][0]["text"] == whole["choices"][0]["text"]
    assert stopped["usage"]["completion_tokens"] == 5
    assert whole["choices"][0]["finish_reason"] == "length"


def test_a_stream_ends_as_cancelled(llm):
    chunks = list(
        llm.create_completion(
            PROMPT, max_tokens=20, temperature=0.0, stream=True, logits_processor=cancelling(llm, 4)
        )
    )
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "cancelled"
    assert set(reasons[:-1]) == {None}
    whole = llm.create_completion(PROMPT, max_tokens=5, temperature=0.0)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]


def test_a_chat_ends_as_cancelled(llm):
    messages = [{"role": "user", "content": "hello"}]
    chat = llm.create_chat_completion(messages, max_tokens=20, logits_processor=cancelling(llm, 2))
    assert chat["choices"][0]["finish_reason"] == "cancelled"
    *_, last = llm.create_chat_completion(
        messages, max_tokens=20, stream=True, logits_processor=cancelling(llm, 2)
    )
    assert last["choices"][0]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_cancelled_in_its_first_batch_has_no_text(llm, monkeypatch, stream):
    at_batch(llm, monkeypatch, 0, llm.cancel)
    result = llm.create_completion(PROMPT, max_tokens=20, stream=stream)
    last = list(result)[-1] if stream else result
    assert last["choices"][0]["finish_reason"] == "cancelled"
    assert last["choices"][0]["text"] == ""
    assert_goes_on_right(llm, monkeypatch, 0)


def test_a_users_criterion_still_counts(llm):
    def long_enough(ids, scores):
        return len(ids) >= len(PROMPT) + 3

    criteria = llama_cpp.StoppingCriteriaList([long_enough])
    asked = {"max_tokens": 20, "temperature": 0.0, "stopping_criteria": criteria}
    ours = llm.create_completion(PROMPT, **asked)
    stock = llm.fresh(llama_cpp.Llama)
    assert ours["choices"] == stock.create_completion(PROMPT, **asked)["choices"]
    assert ours["choices"][0]["finish_reason"] == "stop"
    stock.close()


def test_eval_raises(llm, monkeypatch):
    at_batch(llm, monkeypatch, 2, llm.cancel)
    with pytest.raises(RequestCancelled):
        llm.eval(PROMPT)
    assert llm.n_tokens == llm.runner.live.n
    assert_goes_on_right(llm, monkeypatch, BATCH)


def test_nothing_runs(llm):
    llm.cancel()
    assert len(greedy(llm, PROMPT)) == 8
    llm.cancel()
    assert len(greedy(llm, PROMPT)) == 8
    assert not llm.last_request.cancelled


def test_a_request_that_waits_to_be_advanced_is_ended(llm):
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    llm.cancel()
    with pytest.raises(RequestCancelled):
        next(stream)
    assert len(greedy(llm, PROMPT)) == 8


def test_a_repeat_that_decodes_nothing_is_ended_too(llm, monkeypatch):
    greedy(llm, PROMPT)
    begin = llm.runner.begin

    def cancelled(*arguments):
        turn = begin(*arguments)
        llm.cancel()
        return turn

    monkeypatch.setattr(llm.runner, "begin", cancelled)
    with pytest.raises(RequestCancelled):
        greedy(llm, PROMPT, 1)


def test_from_another_thread(llm, monkeypatch):
    def elsewhere():
        thread = threading.Thread(target=llm.cancel)
        thread.start()
        thread.join()

    at_batch(llm, monkeypatch, 2, elsewhere)
    with pytest.raises(RequestCancelled):
        greedy(llm, PROMPT)
    assert_goes_on_right(llm, monkeypatch, BATCH)


def interrupt(llm, monkeypatch, number, *, before):
    """KeyboardInterrupt right before or right behind native batch `number`."""
    call = llm._ctx.call
    decode, batches = call.decode, iter(range(1000))

    def interrupted(ctx, batch):
        now = next(batches) == number
        if now and before:
            raise KeyboardInterrupt
        code = decode(ctx, batch)
        if now:
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(call, "decode", interrupted)


@pytest.mark.skipif(not native.available, reason="needs the compiled shim")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", [0, 3])
def test_an_interrupt_loses_nothing_that_was_decoded(llm, monkeypatch, number, before):
    interrupt(llm, monkeypatch, number, before=before)
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, PROMPT)
    # Long prompts are cut at their checkpoints too, so that number batches may be shorter than n_batch.
    done = llm.runner.live.n
    assert not llm.runner.live.state.is_invalid
    assert (done > 0) is (number > 0 or not before)
    assert_goes_on_right(llm, monkeypatch, done)


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_while_answering_loses_nothing(llm, monkeypatch, before):
    if not native.available:
        pytest.skip("needs the compiled shim")
    stream = llm.generate(PROMPT, temp=0.0)
    for _ in range(3):
        next(stream)
    interrupt(llm, monkeypatch, 0, before=before)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert not llm.runner.live.state.is_invalid
    assert llm.runner.live.n == len(PROMPT) + (2 if before else 3)
    assert_goes_on_right(llm, monkeypatch, len(PROMPT) - 1)


def test_an_interrupt_without_the_shim_loses_a_batch_at_most(llm, monkeypatch):
    llm._ctx.call = None
    done = []

    def stop():
        done.append(llm.runner.live.n)
        raise KeyboardInterrupt

    original = llama_cpp.llama_cpp.llama_decode

    def interrupted(ctx, batch):
        if llm.runner.live.n >= 2 * BATCH:
            original(ctx, batch)
            stop()
        return original(ctx, batch)

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, PROMPT)
    assert_goes_on_right(llm, monkeypatch, done[0])


def test_an_abort_by_somebody_elses_callback_is_no_cancel(llm, monkeypatch):
    polls = iter(range(10**6))

    @llama_cpp.ggml_abort_callback
    def abort(_):
        return next(polls) >= 100

    llama_cpp.llama_set_abort_callback(llm.ctx, abort, None)
    with pytest.raises(DecodeError) as error:
        greedy(llm, PROMPT)
    assert error.value.code == 2
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)
    assert not llm.last_request.cancelled
    assert_goes_on_right(llm, monkeypatch, 0)
