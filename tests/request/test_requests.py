"""Several requests that take one model's place from each other: threads, pools, the collector, handles."""

import contextvars
import gc
import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid import Llama, PromptCache
from llamahybrid.errors import DecodeError, LlamaHybridError, ModelClosed, RequestCancelled, RequestSuperseded
from tests.lab.draft_fuzz import EveryDraft

KINDS = {"qwen35": {}, "mamba": {}, "gemma3": {"swa_full": False}, "llama": {}}
OPTIONS = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "seed": 7, "verbose": False}


def words(seed, n=60):
    return np.random.default_rng(seed).integers(1, 200, n).tolist()


@pytest.fixture(params=KINDS)
def model(request, tiny_model):
    with_window = {"window": 16} if request.param == "gemma3" else {}
    return str(tiny_model(request.param, **with_window)), {**OPTIONS, **KINDS[request.param]}


@pytest.fixture
def opened():
    made = []

    def open_one(model, kind=Llama, **more):
        path, options = model
        made.append(kind(path, **{**options, **more}))
        return made[-1]

    yield open_one
    for llm in made:
        llm.close()


@pytest.fixture
def fresh(opened, model):
    """`fresh(prompt, n, **sampling)`: what a fresh stock context says."""

    def say(prompt, n=8, **sampling):
        return list(islice(opened(model, llama_cpp.Llama).generate(prompt, **{"temp": 0.0, **sampling}), n))

    return say


def in_turns(streams, order):
    """Advance streams by turns; what each said."""
    said = [[] for _ in streams]
    for index in order:
        said[index].append(next(streams[index]))
    return said


ORDER = [0, 1, 0, 0, 2, 1, 1, 2, 0, 2, 2, 1, 0]


# -- the same text, however they take turns --------------------------------------------------------


def test_streams_by_turns(opened, model, fresh):
    llm = opened(model)
    prompts = [words(1), [*words(1)[:40], *words(2, 30)], words(3)]
    said = in_turns([llm.generate(p, temp=0.0) for p in prompts], ORDER)
    assert said == [fresh(p, len(s)) for p, s in zip(prompts, said, strict=True)]


def test_sampled_streams_keep_their_own_sampler(opened, model, fresh):
    llm = opened(model)
    sampling = [{"temp": 1.0, "repeat_penalty": 1.3}, {"temp": 0.7, "mirostat_mode": 2}, {"temp": 0.0}]
    prompts = [words(seed) for seed in (1, 2, 3)]
    streams = [llm.generate(p, **s) for p, s in zip(prompts, sampling, strict=True)]
    said = in_turns(streams, ORDER)
    for answer, prompt, how in zip(said, prompts, sampling, strict=True):
        assert answer == fresh(prompt, len(answer), **how)


def test_drafts_by_turns(opened, model, fresh):
    llm = opened(model, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=6, max_ngram_size=2))
    llm.drafts.policy = EveryDraft(llm.runner.meter)
    prompts = [[*words(seed, 30), *[5, 9, 13] * 4] for seed in (1, 2, 3)]
    said = in_turns([llm.generate(p, temp=0.0) for p in prompts], ORDER * 2)
    assert said == [fresh(p, len(s)) for p, s in zip(prompts, said, strict=True)]


def test_what_a_draft_had_ahead_is_not_handed_out_to_another(opened, model, fresh):
    """A stream loses its place while tokens that were guessed, and are right, wait to be handed out."""
    llm = opened(model)
    prompt, other = words(1), words(2)
    answer = fresh(prompt, 12)

    class Oracle(llama_cpp.llama_speculative.LlamaDraftModel):
        def __call__(self, ids, /, **kwargs):
            ids = ids.tolist()
            said = ids[len(prompt) :]
            right = ids[: len(prompt)] == prompt and said == answer[: len(said)]
            return np.array(answer[len(said) : len(said) + 5] if right else [1, 2, 3], dtype=np.intc)

    llm.draft_model = Oracle()
    llm.drafts.policy = EveryDraft(llm.runner.meter)  # drafts, whatever they cost
    stream = llm.generate(prompt, temp=0.0)
    said = list(islice(stream, 3))
    for count in (1, 2, 6):
        assert list(islice(llm.generate(other, temp=0.0), 4)) == fresh(other, 4)
        said += islice(stream, count)
    assert said == answer
    assert llm.last_request.accepted > 0, "no guess was at stake"


def test_rows_of_logits_by_turns(opened, model):
    prompts = ["one two three", "four five six seven"]
    asked = {"max_tokens": 6, "temperature": 0.0, "logprobs": 2, "stream": True}
    llm = opened(model, logits_all=True)
    streams = [llm.create_completion(p, **asked) for p in prompts]
    chunks = in_turns(streams, [0, 1, 1, 0, 0, 1])
    for said, prompt in zip(chunks, prompts, strict=True):
        stock = opened(model, llama_cpp.Llama, logits_all=True)
        want = list(islice(stock.create_completion(prompt, **asked), len(said)))
        for ours, theirs in zip(said, want, strict=True):
            ours, theirs = ours["choices"][0], theirs["choices"][0]
            assert ours["text"] == theirs["text"]
            assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
            assert np.allclose(
                ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], atol=1e-3
            )


def test_operations_between_two_tokens_of_a_stream(opened, model, fresh):
    llm = opened(model)
    prompt = words(1)
    stream = llm.generate(prompt, temp=0.0)
    said = [next(stream)]
    state = llm.save_state()
    said.append(next(stream))
    llm.reset()
    llm.eval(words(2, 20))
    said.append(next(stream))
    llm.load_state(state)
    said += islice(stream, 5)
    assert said == fresh(prompt)


def test_a_prompt_continued_without_reset_is_its_own(opened, model, fresh):
    llm = opened(model)
    first, more = words(1), words(2, 10)
    assert list(islice(llm.generate(first, temp=0.0), 3)) == fresh(first, 3)
    known = llm.input_ids[: llm.n_tokens].tolist()
    old = llm.generate(more, temp=0.0, reset=False)
    said = [next(old)]
    assert list(islice(llm.generate(words(4), temp=0.0), 3)) == fresh(words(4), 3)
    said += islice(old, 4)
    assert said == fresh([*known, *more], 5)


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_one_with_tokens_sent_into_it_is_not_guessed_at(opened, model):
    llm = opened(model, logits_all=True)
    stream = llm.generate(words(1), temp=0.0)
    next(stream)
    stream.send([3, 4])
    list(islice(llm.generate(words(2), temp=0.0), 2))
    with pytest.raises(RequestSuperseded):
        next(stream)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_streams_on_the_threads_of_a_pool(opened, model, fresh, workers):
    """As servers do it: every `next` runs on whichever worker is idle."""
    llm = opened(model)
    llm.requests.gate.seats.patience = 0.05
    prompts = [words(seed) for seed in range(4)]
    streams = [llm.generate(p, temp=0.0) for p in prompts]
    with ThreadPoolExecutor(workers) as pool:
        said = [[pool.submit(next, s).result(60)] for s in streams]
        for _ in range(4):
            steps = [pool.submit(next, s) for s in streams]
            for answer, step in zip(said, steps, strict=True):
                answer.append(step.result(60))
    assert said == [fresh(p, 5) for p in prompts]


def test_a_stream_whose_thread_died_does_not_shut_others_out(opened, model, fresh):
    llm = opened(model)
    llm.requests.gate.seats.patience = 0.05
    kept = []

    def begin():
        kept.append(llm.create_completion(words(1), max_tokens=50, stream=True))
        next(kept[0])

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(60)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: list(islice(llm.generate(words(2), temp=0.0), 4))).result(60) == fresh(
            words(2), 4
        )
    assert next(kept[0])["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("bad", [-1, 10**6])
@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_bad_token_shuts_nobody_out(opened, model, fresh, bad):
    llm = opened(model)
    with ThreadPoolExecutor(1) as pool, pytest.raises(DecodeError):
        pool.submit(lambda: next(llm.generate([1, 2, bad]))).result(60)
    llm.requests.gate.wait = False
    assert list(islice(llm.generate(words(1), temp=0.0), 4)) == fresh(words(1), 4)


def test_a_request_is_only_ended_in_its_turn(opened, model, fresh, monkeypatch):
    """Streams that others overtake are dropped by a second thread while the first one works."""
    llm = opened(model)
    llm.requests.gate.seats.patience = 0.0
    end, outside = llm.runner.end, []

    def watched(turn):
        if not llm.requests.gate.inside:
            outside.append(turn)
        end(turn)

    monkeypatch.setattr(llm.runner, "end", watched)
    wanted = {seed: fresh(words(seed), 4) for seed in range(3)}

    def other(stream):
        next(stream)

    with ThreadPoolExecutor(1) as pool:
        for seed in itertools.islice(itertools.cycle(range(3)), 12):
            stream = llm.generate(words(9 + seed), temp=0.0)
            next(stream)
            step = pool.submit(other, stream)
            del stream
            assert list(islice(llm.generate(words(seed), temp=0.0), 4)) == wanted[seed]
            step.result(60)
    assert not outside


# -- finalisers ------------------------------------------------------------------------------------


def abandon(llm, seed):
    """Leave a stream in a reference cycle, as any kept traceback does."""
    stream = llm.generate(words(seed), temp=0.0)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)


def test_a_stream_collected_under_the_caches_lock(opened, model, monkeypatch, fresh):
    cache = PromptCache(1 << 26)
    llm, other = opened(model, prompt_cache=cache), opened(model, prompt_cache=cache)
    match, collected = cache.ram.tree.match, []

    def collecting(*args):
        collected.append(gc.collect())
        return match(*args)

    done = []

    def serve():
        for seed in range(3):
            abandon(llm, seed)
            done.append(list(islice(other.generate(words(10 + seed), temp=0.0), 3)))

    gc.disable()
    gc.freeze()  # a collection looks at what the test has made, and not at all that the suite did before
    try:
        monkeypatch.setattr(cache.ram.tree, "match", collecting)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        thread.join(60)
    finally:
        gc.unfreeze()
        gc.enable()
        monkeypatch.undo()
    assert len(done) == 3, "a finaliser waits for the lock that its own thread holds"
    assert sum(collected) > 0
    assert done == [fresh(words(10 + seed), 3) for seed in range(3)]


def test_a_collected_stream_keeps_its_progress(opened, model):
    llm = opened(model)
    seen = []
    llm.on_request = seen.append
    abandon(llm, 1)
    gc.collect()
    list(islice(llm.generate([*words(1), 7, 8, 9], temp=0.0), 2))
    assert llm.last_request.cached >= len(words(1))
    assert seen[0].generated == 1


def test_a_dropped_stream_is_ended_at_once(opened, model):
    llm = opened(model)
    seen = []
    llm.on_request = seen.append
    for _ in llm.generate(words(1), temp=0.0):
        break
    assert [report.generated for report in seen] == [1]


# -- handles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_handle_cancels_its_own_request_and_no_other(opened, model, fresh):
    llm = opened(model)
    with llm.request() as mine:
        stream = llm.create_completion(words(1), max_tokens=20, temperature=0.0, stream=True)
    with llm.request() as other:
        second = llm.generate(words(2), temp=0.0)
    next(stream)
    said = [next(second)]
    mine.cancel()
    assert list(stream)[-1]["choices"][0]["finish_reason"] == "cancelled"
    said += islice(second, 3)
    assert said == fresh(words(2), 4)
    llm.cancel(other)
    with pytest.raises(RequestCancelled):
        next(second)
    assert [r.cancelled for r in mine.reports] == [True]
    assert len(list(islice(llm.generate(words(3), temp=0.0), 3))) == 3


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_cancelled_handle_cancels_what_is_made_with_it_later(opened, model):
    llm = opened(model)
    with llm.request() as handle:
        handle.cancel()
        answer = llm.create_completion(words(1), max_tokens=5)
    assert answer["choices"][0]["finish_reason"] == "cancelled"
    assert llm.create_completion(words(1), max_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_dropped_handle_has_nothing_made_with_it_begin(opened, model):
    llm = opened(model)
    with llm.request() as handle:
        handle.drop()
        with pytest.raises(RequestCancelled):
            llm.create_completion(words(1), max_tokens=5)
    assert handle.reports == []
    assert llm.create_completion(words(1), max_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_handle_of_a_request_that_is_over_ends_nobody_elses(opened, model):
    llm = opened(model)
    with llm.request() as handle:
        llm.create_completion(words(1), max_tokens=3)
    stream = llm.generate(words(2), temp=0.0)
    next(stream)
    handle.cancel()
    assert len(list(islice(stream, 5))) == 5


# -- closing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_after_close(opened, model):
    llm = opened(model)
    list(islice(llm.generate(words(1), temp=0.0), 3))
    stream = llm.generate([*words(1)[:30], 3, 4], temp=0.0)
    next(stream)
    llm.close()
    llm.reset()
    llm.close()
    for use in (
        lambda: next(stream),
        lambda: next(llm.generate([1, 2])),
        lambda: llm.eval([1, 2]),
        llm.save_state,
        lambda: llm.create_completion([1, 2]),
    ):
        with pytest.raises(ModelClosed):
            use()
    assert llm.last_request.generated == 1


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_closing_while_another_thread_generates(opened, model):
    llm = opened(model)
    begun, raised = threading.Event(), []

    def work():
        try:
            for _ in llm.generate(words(1), temp=0.0):
                begun.set()
        except (ModelClosed, RequestCancelled) as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    llm.close()
    thread.join(60)
    assert len(raised) == 1


# -- forgetting ------------------------------------------------------------------------------------


def test_a_stream_that_is_forgotten_while_it_waits_goes_on_and_is_not_stored(opened, model, fresh):
    llm = opened(model)
    stream = llm.generate(words(1), temp=0.0)
    said = [next(stream)]
    assert list(islice(llm.generate(words(2), temp=0.0), 3)) == fresh(words(2), 3)
    llm.prompt_cache.forget(words(1)[:20])
    said += islice(stream, 20)
    stream.close()
    assert said == fresh(words(1), 21)
    list(islice(llm.generate(words(2), temp=0.0), 2))
    list(islice(llm.generate([*words(1), 3], temp=0.0), 2))
    assert llm.last_request.cached == 0


# -- what an attack found --------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_chat_handler_has_the_model_to_itself(opened, model):
    """It resets, evaluates piece by piece and completes what is there; a stream goes on meanwhile."""
    llm = opened(model)
    llm.requests.gate.seats.patience = 0.0
    pieces, seen = [words(1, 20), words(3, 20)], []

    def handler(*, llama, **_):
        llama.reset()
        for piece in pieces:
            llama.eval(piece)
            time.sleep(0.2)
        seen.append(llama.input_ids[: llama.n_tokens].tolist())
        return llama.create_completion(seen[0], max_tokens=4, temperature=0.0)

    llm.chat_handler = handler
    over = threading.Event()

    def other():
        for _ in llm.generate(words(2), temp=0.0):
            time.sleep(0.02)
            if over.is_set():
                return

    thread = threading.Thread(target=other)
    thread.start()
    llm.create_chat_completion([{"role": "user", "content": "x"}])
    over.set()
    thread.join(60)
    assert seen == [pieces[0] + pieces[1]]


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_model_is_freed_when_nobody_uses_it(model):
    path, options = model
    llm = Llama(path, **options)
    list(islice(llm.generate(words(1), temp=0.0), 2))
    gone = [weakref.ref(each) for each in (llm, llm.runner, llm.evaluation)]
    gc.disable()
    try:
        del llm
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_callback_is_no_part_of_the_step_it_runs_in(opened, model, fresh):
    llm = opened(model)
    raised = []

    def told(report):
        with pytest.raises(LlamaHybridError, match="on_request"):
            list(islice(llm.generate(words(9), temp=0.0), 2))
        with pytest.raises(LlamaHybridError, match="on_request"):
            llm.eval([1, 2])
        raised.append(report)

    llm.on_request = told
    stream, given_up = llm.generate(words(1), temp=0.0), llm.generate(words(2), temp=0.0)
    said = [next(stream)]
    next(given_up)
    cycle = [given_up]
    cycle.append(cycle)
    said.append(next(stream))
    del given_up, cycle
    gc.collect()
    said += islice(stream, 4)
    assert said == fresh(words(1), 6)
    stream.close()
    assert len(raised) == 2


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_completion_that_is_cancelled_while_it_waits_ends_as_such(opened, model):
    llm = opened(model)
    with llm.request() as handle:
        stream = llm.create_completion(words(1, 200), max_tokens=20, temperature=0.0, stream=True)
    next(stream)
    next(llm.generate(words(2), temp=0.0))
    llm.prompt_cache.clear()  # its state has to be decoded again
    handle.cancel()
    assert list(stream)[-1]["choices"][0]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_handles_may_end_in_any_order(opened, model):
    llm = opened(model)

    def inside(handles):
        with llm.request() as handle:
            handles.append(handle)
            yield

    handles = []
    blocks = [inside(handles), inside(handles)]
    for block in blocks:
        next(block)
    for block in blocks:
        block.close()
    llm.create_completion(words(1), max_tokens=2)
    assert [handle.reports for handle in handles] == [[], []]
    third = inside(handles)
    contextvars.copy_context().run(next, third)
    contextvars.copy_context().run(third.close)


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_a_parked_stream_holds_no_stored_state_and_is_told_of_after_close(opened, model):
    llm = opened(model)
    told = []
    llm.on_request = told.append
    list(islice(llm.generate(words(1), temp=0.0), 2))
    list(islice(llm.generate(words(2), temp=0.0), 2))
    with llm.request() as handle:
        stream = llm.generate([*words(1), 3], temp=0.0)
    next(stream)
    ticket = handle._tickets[0]
    assert ticket.request.plan.checkpoint is not None, "nothing was at stake"
    list(islice(llm.generate(words(2), temp=0.0), 2))
    assert (ticket.request.plan.checkpoint, ticket.request.plan.segments) == (None, ())
    llm.close()
    before = len(told)
    stream.close()
    assert len(told) == before + 1
