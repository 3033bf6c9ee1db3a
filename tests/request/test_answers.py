"""Several answers to one prompt: each as if it was asked for alone, and the prompt is decoded once."""

import contextvars
import gc
import threading
from contextlib import suppress

import llama_cpp
import pytest

from llamahybrid.client.answers import RANDOM_SEED, seeds
from llamahybrid.core import slots
from llamahybrid.errors import Busy, ModelClosed
from llamahybrid.harness.counters import DecodeCounter
from tests.lab.waiting import wait_until
from tests.request.asking import ARCHS, DEADLINE, SAMPLED, WORDS, Batches, in_thread, take

PROMPT = WORDS[:150]
ASKED = SAMPLED
MESSAGES = [{"role": "user", "content": "a question of some length, about nothing at all"}]


@pytest.fixture
def several(opened):
    """`several(arch, n_parallel, **arguments)`: a model; in the end its answers gave back their slots."""
    before = threading.active_count()
    made = []

    def open_one(arch="qwen35", n_parallel=1, **more):
        made.append(opened(arch, n_parallel=n_parallel, **more))
        return made[-1]

    yield open_one
    for llm in made:
        with suppress(ModelClosed):
            assert take(llm, WORDS[:20], 1), "every slot was given back"
        llm.close()
    wait_until(lambda: threading.active_count() <= before)


@pytest.fixture
def alone(opened):
    """Answers of a fresh context of upstream's, one a seed, and their usage together."""

    def ask(arch, *args, chat=False, n=3, seed=40, logits_all=False, **asked):
        choices, usage = [], {"prompt_tokens": 0, "completion_tokens": 0}
        for i in range(n):
            llm = opened(arch, llama_cpp.Llama, logits_all=logits_all)
            create = llm.create_chat_completion if chat else llm.create_completion
            made = create(*args, seed=seed + i, **{**ASKED, **asked})
            choices.append({**made["choices"][0], "index": i})
            usage["prompt_tokens"] = made["usage"]["prompt_tokens"]
            usage["completion_tokens"] += made["usage"]["completion_tokens"]
        return choices, {**usage, "total_tokens": sum(usage.values())}

    return ask


def text(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def gathered(made):
    """The text and the finish reason of each answer in a completion or a stream, whose id is one."""
    chunks = [made] if isinstance(made, dict) else list(made)
    texts, ends = {}, {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["delta"].get("content") or "" if "delta" in choice else text(choice)
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
        if choice["finish_reason"] is not None:
            assert choice["index"] not in ends
            ends[choice["index"]] = choice["finish_reason"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    return [texts[i] for i in sorted(texts)], [ends[i] for i in sorted(ends)]


# -- the same answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_each_answer_is_a_fresh_contexts_for_its_seed(several, alone, arch, n_parallel, stream):
    llm = several(arch, n_parallel)
    count = DecodeCounter(llm)
    made = llm.create_completion(PROMPT, n=3, seed=40, stream=stream, **ASKED)
    texts, ends = gathered(made)
    decoded = count.take()
    choices, usage = alone(arch, PROMPT)
    assert (texts, ends) == ([text(c) for c in choices], ["length"] * 3)
    assert len(set(texts)) == 3
    # An answer's last token is not decoded; a prompt's is, in another slot where memory is only cut.
    again = 0 if n_parallel == 1 or arch != "llama" else 2
    assert 0 <= decoded - (usage["total_tokens"] - 3) <= again
    if not stream:
        assert made["choices"] == choices
        assert made["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        assert made["id"].startswith("cmpl-")


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_chats(several, alone, n_parallel):
    llm = several(n_parallel=n_parallel)
    choices, usage = alone("qwen35", MESSAGES, chat=True)
    made = llm.create_chat_completion(MESSAGES, n=3, seed=40, **ASKED)
    assert made["choices"] == choices
    assert made["usage"].items() >= usage.items()
    assert (made["object"], made["id"][:9]) == ("chat.completion", "chatcmpl-")
    chunks = list(llm.create_chat_completion(MESSAGES, n=3, seed=40, stream=True, **ASKED))
    assert gathered(iter(chunks)) == ([text(c) for c in choices], ["length"] * 3)
    told = [(c["choices"][0]["index"], *c["choices"][0]["delta"]) for c in chunks]
    for index in range(3):  # the text of a first token does not wait for the second one
        at = told.index((index, "role"))
        assert told[at + 1] == (index, "content")


def test_the_call_itself_takes_n(several, alone):
    llm = several(n_parallel=2)
    made = llm("a b c d", "suffix", echo=True, n=2, seed=40, **ASKED)
    assert made["choices"] == alone("qwen35", "a b c d", "suffix", n=2, echo=True)[0]


def test_answers_without_a_seed_follow_upstreams_draw(several):
    one, several = several(), several(n_parallel=3)
    first = [one.create_completion(PROMPT, **ASKED)["choices"][0]["text"] for _ in range(2)]
    made = several.create_completion(PROMPT, n=3, **ASKED)
    assert text(made["choices"][0]) == first[0]
    assert len({text(c) for c in made["choices"]}) == 3
    assert several.create_completion(PROMPT, **ASKED)["choices"][0]["text"] == first[1]


def test_seeds():
    assert seeds(5, 3) == [5, 6, 7]
    assert seeds(-1, 2) == [-1, -1]
    assert seeds(RANDOM_SEED, 2) == [RANDOM_SEED] * 2
    assert seeds(RANDOM_SEED - 1, 3) == [RANDOM_SEED - 1, 0, 1]
    assert seeds(2**32, 2) == [2**32, 1]
    assert seeds(-5, 2) == [-5, RANDOM_SEED - 3]


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True, [2]])
def test_wrong_number_of_answers_is_refused(several, n):
    llm = several()
    for create in (llm, llm.create_completion):
        with pytest.raises(ValueError, match="n counts answers"):
            create(PROMPT, n=n)
    with pytest.raises(ValueError, match="n counts answers"):
        llm.create_chat_completion(MESSAGES, n=n, stream=True)


# -- what one asks for, each gets ------------------------------------------------------------------


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_what_is_asked_for_holds_for_each(several, alone, n_parallel):
    llm = several(n_parallel=n_parallel)
    words = text(alone("qwen35", PROMPT, n=1)[0][0])
    criteria = llama_cpp.StoppingCriteriaList([lambda ids, _: len(ids) >= len(PROMPT) + 5])
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "[" [0-9] ("," [0-9])* "]"', verbose=False)
    form = {"response_format": {"type": "json_object", "schema": {"enum": ["one", "another"]}}}
    for asked in ({"stop": [words[1]]}, {"stopping_criteria": criteria}, {"grammar": grammar}):
        made = llm.create_completion(PROMPT, n=3, seed=40, **{**ASKED, **asked, "max_tokens": 24})
        assert made["choices"] == alone("qwen35", PROMPT, max_tokens=24, **asked)[0]
        assert made["choices"][0]["finish_reason"] == "stop"
    assert all(text(c).startswith("[") for c in made["choices"])
    made = llm.create_chat_completion(MESSAGES, n=3, **{**ASKED, **form, "max_tokens": 60})
    assert {text(choice) for choice in made["choices"]} <= {'"one"', '"another"'}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_processors_and_a_bias_count_together(several, n, stream):
    """Upstream adds the bias to the list that was given, in place, and both are then lost (llama.py:1287)."""

    def forbid(_, scores):
        scores[70] -= 1e9
        return scores

    llm, processors = several(n_parallel=2), llama_cpp.LogitsProcessorList([forbid])
    asked = {"logit_bias": {70: 2e8, 71: 1e8}, "logits_processor": processors, "max_tokens": 3}
    made = llm.create_completion(PROMPT, n=n, stream=stream, **asked)
    assert gathered(made)[0] == [llm.detokenize([71] * 3).decode()] * n
    assert len(processors) == 1


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_logprobs(several, alone, n_parallel):
    llm = several(n_parallel=n_parallel, logits_all=True, stock_logprobs=True)
    count = DecodeCounter(llm)
    made = llm.create_completion("a few words", n=2, seed=40, logprobs=2, echo=True, **ASKED)
    prompt = made["usage"]["prompt_tokens"]
    assert count.take() <= prompt + 2 * 7 + 1
    for ours, theirs in zip(
        made["choices"],
        alone("qwen35", "a few words", n=2, logits_all=True, logprobs=2, echo=True)[0],
        strict=True,
    ):
        assert {**ours, "logprobs": None} == {**theirs, "logprobs": None}
        ours, theirs = ours["logprobs"], theirs["logprobs"]
        assert ours["tokens"] == theirs["tokens"]
        assert ours["token_logprobs"][1:] == pytest.approx(theirs["token_logprobs"][1:], abs=1e-3)


# -- who they are ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_each_answer_has_a_report_and_last_request_is_the_firsts(several, n_parallel):
    llm, told = several(n_parallel=n_parallel), []
    llm.on_request = told.append
    with llm.request() as handle:
        made = llm.create_completion(PROMPT, n=3, seed=40, **ASKED)
    llm.on_request = None
    assert [r.total for r in handle.reports] == [len(PROMPT)] * 3
    assert sorted(r.cached for r in handle.reports) == [0, len(PROMPT), len(PROMPT)]
    assert sorted(r.cached for r in told) == [0, len(PROMPT), len(PROMPT)]
    assert llm.last_request.cached == made["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert llm.last_request.generated == 8


@pytest.mark.parametrize("bias", [None, {5: 0.5}])
def test_answers_to_one_prompt_are_decoded_together(several, bias):
    llm, asked = several(n_parallel=3), {**ASKED, "max_tokens": 60, "logit_bias": bias}
    stream = llm.create_completion(PROMPT, n=3, seed=40, stream=True, **asked)
    next(stream)
    batches = Batches(llm)
    list(stream)
    assert 3 in batches.sizes
    assert len(batches.sizes) < sum(batches.sizes)


def test_several_answers_without_waiting_are_all_given_or_all_refused(several, alone, patient):
    llm = several(n_parallel=2, wait=False)
    running = llm.create_completion(WORDS[200:260], stream=True, seed=40, **ASKED)
    next(running)  # one slot is taken: the answers take turns in the other one
    assert llm.create_completion(PROMPT, n=3, seed=40, **ASKED)["choices"] == alone("qwen35", PROMPT)[0]
    second = llm.create_completion(WORDS[260:300], stream=True, seed=40, **ASKED)
    in_thread(next, second)
    next(running)
    with pytest.raises(Busy):
        llm.create_completion(PROMPT, n=2, seed=40, **ASKED)
    running.close()
    second.close()


def test_a_request_between_chunks_does_not_wait_until_the_stream_was_left_alone_long(several, alone, patient):
    """The thread that would read the stream is the one that asks."""
    llm = several(n_parallel=2, wait=DEADLINE / 3)
    right, texts = take(llm, WORDS[200:230], 2), ["", ""]
    for chunk in llm.create_completion(PROMPT, seed=40, n=2, stream=True, **ASKED):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        assert take(llm, WORDS[200:230], 2) == right
    assert texts == [text(choice) for choice in alone("qwen35", PROMPT, n=2)[0]]


def test_several_answers_inside_another_request_are_part_of_it(several, alone):
    """A chat handler of one's own that asks for several answers."""
    llm, made = several(n_parallel=2), []

    def handler(llama, messages, **_):
        made.append(llama.create_completion(PROMPT, n=2, seed=40, **ASKED))
        return made[0]

    llm.chat_handler = handler
    llm.create_chat_completion(MESSAGES)
    assert made[0]["choices"] == alone("qwen35", PROMPT, n=2)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_handler_of_ones_own_answers_one_after_the_other(several, alone, stream):
    llm, lone = several(n_parallel=2), []
    plain = llama_cpp.llama_chat_format.get_chat_completion_handler("llama-2")

    def handler(**asked):
        lone.append(threading.current_thread())
        return plain(**asked)

    llm.chat_handler = handler
    theirs = llm.create_chat_completion(MESSAGES, seed=41, **ASKED)["choices"][0]
    made = llm.create_chat_completion(MESSAGES, n=2, seed=40, stream=stream, **ASKED)
    assert gathered(made)[0][1] == text(theirs)
    assert len(set(lone)) == 1
    assert len(lone) == 3


def test_answers_run_in_the_callers_thread_and_context(several):
    llm, seen, said = several(n_parallel=2), set(), contextvars.ContextVar("said")
    said.set("here")
    processors = llama_cpp.LogitsProcessorList(
        [lambda _, scores: seen.add((said.get(), threading.current_thread())) or scores]
    )
    llm.create_completion(PROMPT, n=2, logits_processor=processors, **ASKED)
    assert seen == {("here", threading.current_thread())}


# -- their end -------------------------------------------------------------------------------------

LONG = {**ASKED, "max_tokens": 400}


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("by", ["handle", "model"])
def test_cancelling_ends_all_with_the_text_so_far(several, alone, patient, n_parallel, by):
    llm = several(n_parallel=n_parallel)
    with llm.request() as handle:
        stream = llm.create_completion(PROMPT, n=3, seed=43, stream=True, **LONG)  # long ones, all three
    chunks = [next(stream)]
    while len({c["choices"][0]["index"] for c in chunks}) < n_parallel or len(chunks) < 5:
        chunks.append(next(stream))
    (handle if by == "handle" else llm).cancel()
    texts, ends = gathered(iter([*chunks, *stream]))
    assert ends == ["cancelled"] * 3
    longest = max(len(said) for said in texts) + 4
    whole = [text(c) for c in alone("qwen35", PROMPT, max_tokens=longest, seed=43)[0]]
    assert all(there.startswith(said.rstrip("\ufffd")) for said, there in zip(texts, whole, strict=True))
    assert texts.count("") == 3 - n_parallel, "an answer that had not begun does not begin"


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("how", ["closed", "collected", "failed"])
def test_a_stream_that_is_given_up_ends_all(several, alone, n_parallel, how):
    llm = several(n_parallel=n_parallel)
    before = threading.active_count() + 1  # the thread that decodes stays
    stream = llm.create_completion(PROMPT, n=3, seed=40, stream=True, **LONG)
    for _ in range(4):
        next(stream)
    if how == "closed":
        stream.close()
        assert threading.active_count() <= before
    elif how == "collected":
        circle = [stream]
        circle.append(circle)
        del stream, circle
        gc.collect()
    else:
        with pytest.raises(RuntimeError, match="mine"):
            stream.throw(RuntimeError("mine"))
    wait_until(lambda: threading.active_count() <= before)
    assert llm.create_completion(PROMPT, n=2, seed=40, **ASKED)["choices"] == alone("qwen35", PROMPT, n=2)[0]


def test_closed_stream_of_several_answers_does_not_wait_for_a_slot(several, patient):
    """Its answers that wait for a slot give up at once, however long those before them take."""
    llm = several(n_parallel=2)
    other = llm.create_completion(WORDS[200:260], stream=True, seed=40, **LONG)
    next(other)
    stream = llm.create_completion(PROMPT, n=2, seed=40, stream=True, **LONG)
    next(stream)
    in_thread(stream.close)
    other.close()


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_error_of_one_answer_ends_all(several, alone, n_parallel, stream):
    llm, calls = several(n_parallel=n_parallel), []

    def fail(ids, _):
        calls.append(len(ids))
        if len(calls) == 9:
            raise LookupError("mine")
        return False

    criteria = llama_cpp.StoppingCriteriaList([fail])
    with pytest.raises(LookupError, match="mine"):
        list(llm.create_completion(PROMPT, n=3, seed=40, stream=stream, stopping_criteria=criteria, **LONG))
    assert len(calls) < 2 * 400
    made = llm.create_completion(PROMPT, n=2, seed=40, **ASKED)
    assert made["choices"] == alone("qwen35", PROMPT, n=2)[0]


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_an_answer_that_loses_its_slot_before_its_first_token(several, alone, patient, monkeypatch, arch):
    """Its prompt is decoded, and the thread that would read it is busy with the answer before it."""
    monkeypatch.setattr(slots, "PATIENCE", 0.01)  # the answer in its processor keeps its slot
    llm, others = several(arch, n_parallel=2), []

    def another_asks(_, scores):
        if not others:
            others.append(in_thread(take, llm, WORDS[200:230], 2))
        return scores

    processors = llama_cpp.LogitsProcessorList([another_asks])
    made = llm.create_completion(PROMPT, n=2, seed=40, logits_processor=processors, **ASKED)
    assert made["choices"] == alone(arch, PROMPT, n=2)[0]


def test_several_answers_are_refused_where_upstream_refuses_one(several):
    for n_parallel in (1, 2):
        llm = several(n_parallel=n_parallel)
        for n in (1, 2):
            with pytest.raises(ValueError, match=f"exceed context window of {llm.n_ctx()}$"):
                llm.create_completion(WORDS * 6, n=n)
        with pytest.raises(ValueError, match="logprobs is not supported"):
            llm.create_completion(PROMPT, n=2, logprobs=1)
        with pytest.raises(TypeError):
            llm.create_completion(PROMPT, n=2, best_of=3)
        with pytest.raises(TypeError):
            llm.create_chat_completion(MESSAGES, n=2, best_of=3)


def test_completion_after_the_end_of_several_answers_is_none_of_them(several, alone):
    """A chat format of one's own keeps the context of an answer, for a thread of its own, say."""
    llm, kept = several(n_parallel=2), []
    registry = llama_cpp.llama_chat_format.LlamaChatCompletionHandlerRegistry()

    def handler(**_):
        kept.append(contextvars.copy_context())
        raise LookupError("mine")

    registry.register_chat_completion_handler("keeps", handler)
    llm.chat_format = "keeps"
    try:
        with pytest.raises(LookupError, match="mine"):
            llm.create_chat_completion(MESSAGES, n=2, seed=50, **ASKED)
    finally:
        registry.unregister_chat_handler("keeps")
    made = kept[0].run(llm.create_completion, PROMPT, seed=40, **ASKED)
    assert made["choices"] == alone("qwen35", PROMPT, n=1)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_first_answer_resumes_from_upstreams_cache(several, alone, stream):
    llm = several("llama")
    llm.set_cache(llama_cpp.LlamaRAMCache())
    for prompt in (PROMPT, WORDS[200:300]):
        llm.create_completion(prompt, max_tokens=4)
    llm.prompt_cache.clear()
    asked = {**ASKED, "n": 3, "seed": 40, "stream": stream}
    texts, _ = in_thread(lambda: gathered(llm.create_completion(PROMPT, **asked)))
    assert texts == [text(choice) for choice in alone("llama", PROMPT)[0]]
