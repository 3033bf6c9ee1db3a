"""Several requests that take one model's place from each other: threads, pools, the collector, callbacks."""

import gc
import threading
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from llamahybrid import PromptCache
from llamahybrid.errors import LlamaHybridError
from tests.lab.draft_fuzz import EveryDraft
from tests.request.asking import ARCHS, DEADLINE, Started, begin, in_thread, take

every_arch = pytest.mark.parametrize("arch", ARCHS)
ORDER = [0, 1, 0, 0, 2, 1, 1, 2, 0, 2, 2, 1, 0]


def words(seed, n=60):
    return np.random.default_rng(seed).integers(1, 200, n).tolist()


PROMPTS = [words(1), [*words(1)[:40], *words(2, 30)], words(3)]


def in_turns(streams, order):
    """Advance streams by turns; what each said."""
    said = [[] for _ in streams]
    for index in order:
        said[index].append(next(streams[index]))
    return said


# -- the same text, however they take turns --------------------------------------------------------


def test_stream_that_was_never_advanced_does_nothing(opened, stock):
    llm = opened()
    unstarted = llm.generate(words(2), temp=0.0)
    answer = take(llm, words(1), 4)
    del unstarted
    gc.collect()
    assert answer == stock()(words(1), 4)
    assert llm.input_ids[: llm.n_tokens].tolist() == words(1) + answer[:-1]


@every_arch
@pytest.mark.parametrize("slots", [1, 2])
def test_streams_by_turns_keep_their_own_sampler(opened, arch, slots):
    llm = opened(arch, n_parallel=slots)
    sampling = [{"temp": 1.0, "repeat_penalty": 1.3}, {"temp": 0.7, "mirostat_mode": 2}, {"temp": 0.0}]
    streams = [llm.generate(p, **how) for p, how in zip(PROMPTS, sampling, strict=True)]
    said = in_turns(streams, ORDER)
    for answer, prompt, how in zip(said, PROMPTS, sampling, strict=True):
        assert answer == take(opened(arch, llama_cpp.Llama), prompt, len(answer), **how)


def test_guessed_tokens_are_handed_to_their_own_stream_alone(opened, stock):
    """A stream loses its place while tokens that were guessed, and are right, wait to be handed out."""
    llm, right = opened(), stock()
    prompt, other = words(1), words(2)
    answer = right(prompt, 12)

    class Oracle(llama_cpp.llama_speculative.LlamaDraftModel):
        def __call__(self, ids, /, **kwargs):
            ids = ids.tolist()
            said = ids[len(prompt) :]
            knows = ids[: len(prompt)] == prompt and said == answer[: len(said)]
            return np.array(answer[len(said) : len(said) + 5] if knows else [1, 2, 3], dtype=np.intc)

    llm.draft_model = Oracle()
    llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)  # drafts, whatever they cost
    stream, said = begin(llm, prompt, 3)
    for count in (1, 2, 6):
        assert take(llm, other, 4) == right(other, 4)
        said += islice(stream, count)
    assert said == answer
    assert llm.last_request.accepted > 0, "no guess was at stake"


@every_arch
def test_rows_of_logits_by_turns(opened, arch):
    prompts = ["one two three", "four five six seven"]
    asked = {"max_tokens": 6, "temperature": 0.0, "logprobs": 2, "stream": True}
    llm = opened(arch, logits_all=True)
    chunks = in_turns([llm.create_completion(p, **asked) for p in prompts], [0, 1, 1, 0, 0, 1])
    for said, prompt in zip(chunks, prompts, strict=True):
        alone = opened(arch, llama_cpp.Llama, logits_all=True)
        want = list(islice(alone.create_completion(prompt, **asked), len(said)))
        for ours, theirs in zip(said, want, strict=True):
            ours, theirs = ours["choices"][0], theirs["choices"][0]
            assert ours["text"] == theirs["text"]
            ours, theirs = ours["logprobs"], theirs["logprobs"]
            assert ours["tokens"] == theirs["tokens"]
            assert np.allclose(ours["token_logprobs"], theirs["token_logprobs"], atol=1e-3)


@every_arch
def test_a_chat_that_grows_keeps_its_array_of_rows(opened, arch):
    """Upstream has one array of n_ctx rows: as many bytes as a second one would be copied at each turn."""
    llm = opened(arch, logits_all=True)
    llm.create_completion(PROMPTS[0], max_tokens=3, temperature=0.0)
    rows, ids = llm.scores, llm.input_ids[: llm.n_tokens].tolist()
    llm.create_completion([*ids, 5, 6, 7], max_tokens=3, temperature=0.0)
    assert np.shares_memory(rows, llm.scores)
    alone = opened(arch, llama_cpp.Llama, logits_all=True)
    alone.eval(llm.input_ids[: llm.n_tokens].tolist())
    assert np.allclose(llm.scores[: llm.n_tokens], alone.scores[: llm.n_tokens], atol=1e-3)


@every_arch
@pytest.mark.parametrize("slots", [1, 3])
def test_operations_between_two_tokens_of_a_stream(opened, stock, arch, slots):
    llm = opened(arch, n_parallel=slots)
    stream, said = begin(llm, words(1))
    state = llm.save_state()
    said.append(next(stream))
    llm.reset()
    llm.eval(words(2, 20))
    said.append(next(stream))
    llm.load_state(state)
    assert llm.input_ids[: llm.n_tokens].tolist() == words(1)
    said += islice(stream, 5)
    assert said == stock(arch)(words(1))


@every_arch
def test_prompt_continued_without_reset_is_its_own(opened, stock, arch):
    llm, right = opened(arch), stock(arch)
    first, more = words(1), words(2, 10)
    assert take(llm, first, 3) == right(first, 3)
    known = llm.input_ids[: llm.n_tokens].tolist()
    old = llm.generate(more, temp=0.0, reset=False)
    said = [next(old)]
    assert take(llm, words(4), 3) == right(words(4), 3)
    said += islice(old, 4)
    assert said == right([*known, *more], 5)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_streams_of_dead_threads_give_their_slots_up(opened, stock, impatient, slots):
    llm, right = opened(n_parallel=slots), stock()
    left = [in_thread(begin, llm, words(1)) for _ in range(slots + 1)]
    assert in_thread(take, llm, words(2), 4) == right(words(2), 4)
    stream, said = left[0]
    assert [*said, *islice(stream, 3)] == right(words(1), 4)


# -- the collector ---------------------------------------------------------------------------------


def abandon(llm, seed):
    """Leave a stream in a reference cycle, as any kept traceback does."""
    cycle = [begin(llm, words(seed))[0]]
    cycle.append(cycle)


def test_stream_collected_under_the_caches_lock(opened, stock, monkeypatch):
    cache = PromptCache(1 << 26)
    llm, other = opened(prompt_cache=cache), opened(prompt_cache=cache)
    match, collected, done = cache.tree.match, [], []

    def collecting(*args):
        collected.append(gc.collect())
        return match(*args)

    def serve():
        for seed in range(3):
            abandon(llm, seed)
            done.append(take(other, words(10 + seed), 3))

    gc.disable()
    gc.freeze()  # a collection looks at what the test has made, and not at all that the suite did before
    try:
        monkeypatch.setattr(cache.tree, "match", collecting)
        Started(serve).join(DEADLINE)
    finally:
        gc.unfreeze()
        gc.enable()
        monkeypatch.undo()
    assert len(done) == 3, "a finaliser waits for the lock that its own thread holds"
    assert sum(collected) > 0
    assert done == [stock()(words(10 + seed), 3) for seed in range(3)]


@pytest.mark.parametrize("how", ["closed", "dropped", "collected"])
@pytest.mark.parametrize("slots", [1, 2])
def test_given_up_stream_ends_at_once_and_frees_its_slot(opened, patient, how, slots):
    llm, seen = opened(n_parallel=slots, wait=False), []
    llm.on_request = seen.append

    def give_up(seed):
        stream, _ = begin(llm, words(seed))
        if how == "closed":
            stream.close()
        elif how == "collected":
            abandon(llm, seed)

    for seed in range(slots):
        in_thread(give_up, seed)
    gc.collect()
    assert len(take(llm, words(9))) == 8
    assert {report.generated for report in seen[:slots]} == {1}
    take(llm, [*words(0), 7, 8, 9], 2)
    assert llm.last_request.cached >= len(words(0))


# -- callbacks and handlers ------------------------------------------------------------------------


def test_on_request_may_not_use_its_model(opened, stock):
    llm, raised = opened(), []

    def told(report):
        with pytest.raises(LlamaHybridError, match="on_request"):
            take(llm, words(9), 2)
        with pytest.raises(LlamaHybridError, match="on_request"):
            llm.eval([1, 2])
        raised.append(report)

    llm.on_request = told
    stream, said = begin(llm, words(1))
    abandon(llm, 2)
    said.append(next(stream))
    gc.collect()
    said += islice(stream, 4)
    assert said == stock()(words(1), 6)
    stream.close()
    assert len(raised) == 2


def test_error_of_on_request_for_a_dropped_stream_fails_no_other(opened, stock):
    llm = opened()

    def told(report):
        if report.total == 50:
            raise LookupError("mine")

    llm.on_request = told
    cycle = [begin(llm, words(2, 50))[0]]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert take(llm, words(1)) == stock()(words(1))
    assert take(llm, words(3)) == stock()(words(3))


def test_chat_handler_has_the_model_to_itself(opened, impatient):
    """The handler resets, evaluates in pieces and completes them, while a stream goes on."""
    llm = opened()
    pieces, seen, over = [words(1, 20), words(3, 20)], [], threading.Event()
    came = threading.Event()

    def handler(*, llama, **_):
        llama.reset()
        for piece in pieces:
            llama.eval(piece)
            assert came.wait(DEADLINE)
        seen.append(llama.input_ids[: llama.n_tokens].tolist())
        return llama.create_completion(seen[0], max_tokens=4, temperature=0.0)

    def other():
        while not over.is_set():
            came.set()
            take(llm, words(2))

    llm.chat_handler = handler
    thread = Started(other)
    try:
        llm.create_chat_completion([{"role": "user", "content": "x"}])
    finally:
        over.set()
        thread.result()
    assert seen == [pieces[0] + pieces[1]]


@pytest.mark.parametrize("slots", [1, 2])
def test_criterion_may_ask_its_own_model(opened, stock, slots):
    llm, right, prompt, asked = opened(n_parallel=slots), stock(), list(range(10, 30)), []

    def enough(ids, _):
        asked.append(take(llm, [7, 8, 9], 2))
        return len(asked) > 5

    criteria = llama_cpp.StoppingCriteriaList([enough])
    assert list(llm.generate(prompt, temp=0.0, stopping_criteria=criteria)) == right(prompt, 5)
    assert asked == [right([7, 8, 9], 2)] * 6
    assert take(llm, prompt) == right(prompt)


# -- handles and forgetting ------------------------------------------------------------------------


@every_arch
@pytest.mark.parametrize("waits", [False, True])
def test_stream_that_is_forgotten_goes_on_and_is_not_stored(opened, stock, arch, waits):
    llm, right = opened(arch), stock(arch)
    stream, said = begin(llm, words(1))
    if waits:
        assert take(llm, words(2), 3) == right(words(2), 3)
    llm.prompt_cache.forget(words(1)[:20])
    said += islice(stream, 90)
    stream.close()
    assert said == right(words(1), 91)
    take(llm, words(2), 2)
    take(llm, [*words(1), 3], 2)
    assert llm.last_request.cached == 0


def test_warmed_prompt_leaves_the_seed_alone(opened):
    """A request without a seed draws it from what the last one drew."""
    text = "When does the boat leave? " * 4
    messages, said = [{"role": "user", "content": text}], []
    for ahead in ((), (text, messages)):
        llm = opened(seed=5)
        for prompt in ahead:
            llm.warm(prompt)
        said.append(llm.create_chat_completion(messages, max_tokens=12, temperature=2.0)["choices"][0])
    assert said[0] == said[1]
    llm.create_chat_completion(messages, max_tokens=1)
    assert llm.last_request.left == 0
