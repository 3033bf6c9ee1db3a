"""Uses of llama_cpp.Llama, with several requests at once, give the results of a fresh one of upstream's."""

import asyncio
import threading
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from tests.request.asking import ARCHS, DEADLINE, SAMPLED, WORDS, begin, each, in_thread, said, take

pytestmark = [pytest.mark.parametrize("arch", ARCHS)]


@pytest.fixture
def llm(opened, arch):
    """A model of two slots."""
    return opened(arch, n_parallel=2)


@pytest.fixture
def fresh(opened, arch):
    """A fresh model of upstream's."""
    return lambda **more: opened(arch, llama_cpp.Llama, **more)


# -- seeds -----------------------------------------------------------------------------------------


def test_seed_that_is_set_beside_a_request_is_not_the_requests(llm):
    wanted = said(llm.create_completion(WORDS[:50], seed=5, **SAMPLED))
    setting = [lambda _, scores: (in_thread(llm.set_seed, 99), scores)[1]]
    made = llm.create_completion(
        WORDS[:50], seed=5, logits_processor=llama_cpp.LogitsProcessorList(setting), **SAMPLED
    )
    assert said(made) == wanted


def test_seeds_go_on_as_upstreams(llm, fresh):
    stock = fresh()
    for one in (llm, stock):
        one.set_seed(3)
    whole, streamed = (
        [said(one.create_completion(WORDS[:40], stream=i == 1 and one is llm, **SAMPLED)) for i in range(3)]
        for one in (stock, llm)
    )
    assert streamed == whole


# -- by hand ---------------------------------------------------------------------------------------


def loop(llm, prompt, turns=lambda: None, n=8):
    """The loop of upstream's low-level examples; the answer, and what upstream's attributes say after it."""
    llm.reset()
    turns()
    llm.eval(prompt)
    answer = []
    for _ in range(n):
        turns()
        answer.append(llm.sample(temp=0.0))
        turns()
        llm.eval([answer[-1]])
    return answer, llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()


@pytest.mark.parametrize("threads", [2, 5])
def test_loops_of_eval_and_sample(llm, fresh, threads):
    stock = fresh()
    prompts = [WORDS[20 * i : 20 * i + 40 + i] for i in range(threads)]
    wanted = [loop(stock, prompt) for prompt in prompts]
    step = threading.Barrier(threads, timeout=DEADLINE)
    assert each(lambda prompt: loop(llm, prompt, step.wait), prompts) == wanted


def test_loop_by_hand_after_a_stream_samples_with_its_own_options(llm, fresh):
    seen = []
    processors = llama_cpp.LogitsProcessorList([lambda _, scores: seen.append(1) or scores])
    stream = llm.generate(WORDS[:30], temp=5.0, logits_processor=processors)
    assert len(list(islice(stream, 3))) == 3
    stream.close()
    seen.clear()
    assert loop(llm, WORDS[40:80]) == loop(fresh(), WORDS[40:80])
    assert not seen


def test_loop_goes_on_where_its_slot_was_given_away(llm, fresh):
    """Sampling, evaluating and saving: others had every slot between any two of its calls."""
    stock = fresh()
    others = iter(range(100))

    def come_between():
        each(lambda i: take(llm, WORDS[100 + next(others) % 40 + i : 150]), range(3))

    wanted = loop(stock, WORDS[:60], n=3)
    assert loop(llm, WORDS[:60], come_between, n=3) == wanted
    come_between()
    state = llm.save_state()
    assert state.input_ids[: state.n_tokens].tolist() == wanted[2]
    llm.reset()
    llm.load_state(state)
    assert llm.input_ids[: llm.n_tokens].tolist() == wanted[2]
    stock.eval([5])
    llm.eval([5])
    assert llm.sample(temp=0.0) == stock.sample(temp=0.0)


def test_attributes_that_a_thread_sets_are_its_own(llm):
    stream, first = begin(llm, WORDS[:20])

    def meddle():
        before = llm.n_tokens
        llm.n_tokens = 3
        return before, llm.n_tokens

    assert in_thread(meddle) == (20, 3)
    assert llm.n_tokens == 20
    next(stream)
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:20], *first]


def test_thread_goes_on_behind_its_own_open_stream(llm):
    stream, first = begin(llm, WORDS[:20])
    llm.eval([*first, 7])
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:20], *first, 7]
    assert next(stream) >= 0
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:20], *first]


def test_generating_goes_on_behind_evaluated_tokens(llm, fresh):
    def go_on(one, start):
        one.reset()
        one.eval(WORDS[start : start + 50])
        first = list(islice(one.generate(WORDS[60:70], temp=0.0, reset=False), 5))
        return first, list(islice(one.generate([5, 6], temp=0.0, reset=False), 5))

    stock = fresh()
    wanted = [go_on(stock, start) for start in range(3)]
    assert each(lambda start: go_on(llm, start), range(3)) == wanted


def test_rows_of_logits_are_the_threads_own(opened, fresh, arch):
    llm, stock = opened(arch, n_parallel=2, logits_all=True), fresh(logits_all=True)
    prompts = [WORDS[20 * i : 20 * i + 40] for i in range(3)]
    step = threading.Barrier(3, timeout=DEADLINE)

    def rows(prompt):
        llm.reset()
        llm.eval(prompt)
        step.wait()
        llm.eval([9])
        step.wait()
        return llm.scores[: llm.n_tokens].copy(), np.array(llm.eval_logits), list(llm.eval_tokens)

    for prompt, (scores, logits, ids) in zip(prompts, each(rows, prompts), strict=True):
        stock.reset()
        stock.eval(prompt)
        stock.eval([9])
        assert ids == list(stock.eval_tokens)
        np.testing.assert_allclose(scores, stock.scores[: stock.n_tokens], atol=5e-3)
        np.testing.assert_allclose(logits, np.array(stock.eval_logits), atol=5e-3)


# -- completions -----------------------------------------------------------------------------------


def test_processors_and_criteria_find_their_own_request(llm, fresh):
    stock = fresh()

    def complete(one, start):
        told = []

        def process(ids, scores):
            n = one.n_tokens
            told.append((n, one.input_ids[:n].tolist(), one.detokenize(one.input_ids[:n].tolist())))
            scores[65 + one.tokenize(b"abc")[-1] % 7] += 2
            return scores

        def criterion(ids, _):
            told.append(len(ids))
            return len(ids) >= 36

        made = one.create_completion(
            WORDS[start : start + 30],
            seed=5,
            logits_processor=llama_cpp.LogitsProcessorList([process]),
            stopping_criteria=llama_cpp.StoppingCriteriaList([criterion]),
            **SAMPLED,
        )
        return made["choices"][0], told

    wanted = [complete(stock, start) for start in (0, 40, 80)]
    assert each(lambda start: complete(llm, start), (0, 40, 80)) == wanted


# -- as frameworks use it --------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_streams_of_coroutines_whose_steps_run_in_any_thread(opened, fresh, impatient, arch, slots):
    """As servers do: each chunk is fetched in whatever thread of a pool is free."""
    llm, stock = opened(arch, n_parallel=slots), fresh()
    prompts = [WORDS[5 * i : 5 * i + 30 + i] for i in range(4)]
    wanted = [said(stock.create_completion(p, seed=i, **SAMPLED)) for i, p in enumerate(prompts)]

    async def complete(i):
        stream, chunks = llm.create_completion(prompts[i], seed=i, stream=True, **SAMPLED), []
        while (chunk := await asyncio.to_thread(next, stream, None)) is not None:
            chunks.append(chunk)
        return said(chunks)

    async def all_of_them():
        return await asyncio.gather(*(complete(i) for i in range(4)))

    assert asyncio.run(all_of_them()) == wanted
