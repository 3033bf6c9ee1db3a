"""What a call names its parameters, and what becomes of a completion's end."""

import llama_cpp
import pytest

from llamahybrid import Llama, RequestCancelled, RequestSuperseded
from llamahybrid.request.completion import arguments
from tests.conftest import take

WORDS = "When does the boat leave? " * 4


@pytest.fixture
def llm(tiny_model):
    made = Llama(str(tiny_model("qwen35")), n_ctx=512, n_threads=1, verbose=False)
    yield made
    made.close()


def test_arguments_are_named_as_upstream_names_them_and_self_is_left_out():
    named = arguments(llama_cpp.Llama.create_completion)
    assert named("a prompt", max_tokens=3) == {"prompt": "a prompt", "max_tokens": 3}
    with pytest.raises(TypeError):
        named("a prompt", nonsense=1)


def test_a_users_criteria_are_asked_and_his_options_stay_his(llm):
    asked = []
    criteria = llama_cpp.StoppingCriteriaList([lambda ids, scores: bool(asked.append(len(ids)))])
    llm.create_completion(WORDS, max_tokens=4, stopping_criteria=criteria)
    assert len(asked) >= 3
    assert len(criteria) == 1


def test_a_completion_that_is_cancelled_ends_with_its_text_and_says_so(llm):
    chunks = []
    for chunk in llm.create_completion(WORDS, max_tokens=64, stream=True):
        chunks.append(chunk)
        if len(chunks) == 3:
            llm.cancel()
    assert chunks[-1]["choices"][0]["finish_reason"] == "cancelled"
    assert llm.last_request.cancelled


def test_tokens_that_are_generated_raise_instead(llm):
    stream = llm.generate([1, 2, 3], temp=0.0)
    next(stream)
    llm.cancel()
    with pytest.raises(RequestCancelled):
        next(stream)
    assert llm.last_request.generated == 1


@pytest.mark.parametrize("slots", [1, 2])
def test_what_asks_its_own_model_inside_a_step_does_not_go_on_from_that(open_model, fresh, slots):
    llm, prompt = open_model(n_parallel=slots), list(range(10, 30))
    stops = llama_cpp.StoppingCriteriaList([lambda ids, scores: bool(take(llm, [7, 8, 9], 2)) and False])
    stream = llm.generate(prompt, temp=0.0, stopping_criteria=stops)
    assert next(stream) == fresh(prompt, 1)[0], "that was sampled before"
    with pytest.raises(RequestSuperseded, match="inside a step"):
        next(stream)
    assert take(llm, prompt) == fresh(prompt)


def test_what_asks_its_own_model_whether_it_is_done_gets_its_answer(open_model, fresh):
    llm, prompt, asked = open_model(), list(range(10, 30)), []

    def enough(ids, scores):
        if len(ids) == len(prompt) + 3:
            asked.append(take(llm, [7, 8, 9], 2))
        return bool(asked)

    stops = llama_cpp.StoppingCriteriaList([enough])
    assert list(llm.generate(prompt, temp=0.0, stopping_criteria=stops)) == fresh(prompt, 3)
    assert asked == [fresh([7, 8, 9], 2)]


def test_what_is_decoded_ahead_is_there(llm):
    llm.warm(WORDS)
    llm.create_completion(WORDS, max_tokens=1)
    assert llm.last_request.left == 0


def test_what_is_decoded_ahead_changes_nothing_that_is_said(open_model):
    """A request without a seed draws it from what the last one drew."""
    messages, said = [{"role": "user", "content": WORDS}], []
    for ahead in ((), (WORDS, messages)):
        llm = open_model(seed=5)
        for prompt in ahead:
            llm.warm(prompt)
        said.append(llm.create_chat_completion(messages, max_tokens=12, temperature=2.0)["choices"][0])
    assert said[0] == said[1]
