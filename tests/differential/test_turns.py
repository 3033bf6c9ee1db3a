"""Generators left hanging, overtaken, closed late or advanced too late, and several threads at once."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

pytestmark = [pytest.mark.patched]
ARCHITECTURES = (
    "qwen35",
    "gemma3",
    pytest.param("llama", marks=pytest.mark.full),
    pytest.param("mamba", marks=pytest.mark.full),
)


@pytest.fixture(params=ARCHITECTURES)
def model(request, tiny_model):
    return tiny_model(request.param)


def right(expected, prompt, answer):
    """Whether a fresh stock context would have said `answer`."""
    return answer == expected.logits(prompt, answer)[:-1].argmax(axis=1).tolist()


def test_overtaken_generators_go_on(opened, reference, model):
    llm, expected = opened(model), reference(model)
    prompts = [expected.vocabulary.text(50, seed) for seed in (1, 2, 3)]
    streams = [llm.generate(prompt, temp=0.0) for prompt in prompts]
    answers = [[], [], []]
    for turn in (0, 1, 2, 0, 0, 2, 1, 0, 1, 2):
        answers[turn] += islice(streams[turn], 2)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert right(expected, prompt, answer)


@pytest.mark.parametrize("end", ["close", "collect"])
def test_an_overtaken_generator_ends_without_a_trace(opened, reference, model, end):
    llm, expected = opened(model), reference(model)
    first, second = (expected.vocabulary.text(50, seed) for seed in (1, 2))
    old = llm.generate(first, temp=0.0)
    next(old)
    new = llm.generate(second, temp=0.0)
    answer = [next(new)]
    if end == "close":
        old.close()
    else:
        del old
        gc.collect()
    answer += islice(new, 5)
    assert right(expected, second, answer)
    again = [*second, *answer, 40]
    assert right(expected, again, list(islice(llm.generate(again, temp=0.0), 4)))


def test_an_abandoned_generator_leaves_its_progress(opened, reference, model):
    llm, expected = opened(model), reference(model)
    prompt = expected.vocabulary.text(80, seed=1)
    hanging = llm.generate(prompt, temp=0.0)
    answer = list(islice(hanging, 6))
    follow_up = [*prompt, *answer, 40, 41]
    assert right(expected, follow_up, list(islice(llm.generate(follow_up, temp=0.0), 4)))
    assert llm.last_request.cached >= len(prompt) + len(answer) - 1


def test_a_generator_that_was_never_started_does_nothing(opened, reference, model):
    llm, expected = opened(model), reference(model)
    prompt = expected.vocabulary.text(50, seed=1)
    unstarted = llm.generate(expected.vocabulary.text(60, seed=2), temp=0.0)
    answer = list(islice(llm.generate(prompt, temp=0.0), 4))
    del unstarted
    gc.collect()
    assert right(expected, prompt, answer)
    assert llm.input_ids[: llm.n_tokens].tolist() == prompt + answer[:-1]


def test_threads_on_one_llama(opened, reference, model):
    llm, expected = opened(model), reference(model)
    start = threading.Barrier(3)

    def ask(seed):
        """To the end of each request, as the completion calls do: an unfinished one may be overtaken."""
        prompt, turns = expected.vocabulary.text(40, seed), []
        start.wait()
        for turn in range(4):
            text = llm.create_completion(prompt, max_tokens=6, temperature=0)
            turns.append((list(prompt), text["choices"][0]["text"]))
            prompt = [*prompt, *expected.vocabulary.text(5, seed + turn)]
        return turns

    with ThreadPoolExecutor(3) as pool:
        results = [turn for turns in pool.map(ask, (10, 20, 30)) for turn in turns]
    alone = opened(llm.model_path, prompt_cache=False)
    for prompt, text in results:
        assert text == alone.create_completion(prompt, max_tokens=6, temperature=0)["choices"][0]["text"]
