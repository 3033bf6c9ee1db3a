"""What users of llama_cpp.Llama do holds with several requests at once, as on a fresh one of upstream's."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.errors import RequestCancelled
from tests.request.test_parallel import OPTIONS, WORDS, together

SAMPLED = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "max_tokens": 8}
CHATS = [
    [{"role": "user", "content": f"{word}, if you please, and {word} again"}]
    for word in ("tea", "ink", "oil")
]
KINDS = ["qwen35", "llama"]


@pytest.fixture(params=KINDS)
def model(request, tiny_model):
    return str(tiny_model(request.param)), OPTIONS


@pytest.fixture
def hybrid(tiny_model):
    return str(tiny_model("qwen35")), OPTIONS


@pytest.fixture
def opened():
    made = []

    def open_one(model, n_parallel=2, cls=Llama, **more):
        path, options = model
        ours = {"n_parallel": n_parallel} if cls is Llama else {}
        made.append(cls(path, **{**options, **ours, **more}))
        return made[-1]

    yield open_one
    for llm in made:
        llm.close()


@pytest.fixture
def fresh(opened, model):
    """A fresh model of upstream's."""
    return lambda **more: opened(model, cls=llama_cpp.Llama, **more)


def said(made):
    """The text of a completion or of its chunks."""
    if isinstance(made, dict):
        choice = made["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    pieces = [chunk["choices"][0] for chunk in made]
    return "".join(p["text"] if "text" in p else p["delta"].get("content") or "" for p in pieces)


def ask(llm, prompt, n=8):
    return list(islice(llm.generate(prompt, temp=0.0), n))


# -- cancelling and seeds --------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["another one's prompt", "room"])
def test_a_completion_that_is_cancelled_before_its_prompt_says_so(hybrid, opened, monkeypatch, where):
    llm = opened(hybrid)
    with llm.request() as handle:

        def cancelled(*_):
            handle.cancel()
            llm._gate.check()

        if where == "room":
            monkeypatch.setattr(llm.slots.batcher.cells, "wait", cancelled)
        else:
            monkeypatch.setattr(llm.slots.batcher, "begin_prompt", cancelled)
        made = llm.create_completion(WORDS[:50])
        *_, last = llm.create_completion(WORDS[:50], stream=True)
        with pytest.raises(RequestCancelled):
            next(llm.generate(WORDS[:50]))
    monkeypatch.undo()
    assert [c["choices"][0]["finish_reason"] for c in (made, last)] == ["cancelled"] * 2
    assert made["choices"][0]["text"] == ""
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert llm.create_completion(WORDS[:50])["choices"][0]["finish_reason"] != "cancelled"


def test_a_completion_that_is_cancelled_while_it_waits_to_come_back_says_so(hybrid, opened, monkeypatch):
    llm = opened(hybrid)
    with llm.request() as handle:
        stream = llm.create_completion(WORDS[:50], stream=True, **{**SAMPLED, "max_tokens": 100})
    first = next(stream)
    llm._gate.seats.patience = 0
    together(*(lambda i=i: [llm._gate.alone(int), ask(llm, WORDS[i : i + 30])] for i in range(2)))
    ask(llm, WORDS[:20])  # its own thread wants something else
    others = [llm.generate(WORDS[i : i + 30], temp=0.0) for i in range(2)]
    assert [next(other) for other in others]

    def cancelled(*_):
        handle.cancel()
        llm._gate.check()

    monkeypatch.setattr(llm.slots.batcher.cells, "wait", cancelled)
    *_, last = stream
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "cancelled"


def test_a_seed_that_is_set_beside_a_request_is_not_the_requests(hybrid, opened, monkeypatch):
    """`set_seed` is for the next request, whatever slot the calling thread used last."""
    llm = opened(hybrid)
    wanted = llm.create_completion(WORDS[:50], seed=5, **SAMPLED)["choices"][0]["text"]
    ask(llm, WORDS[100:140], 2)
    begin = llm.slots.batcher.begin_prompt

    def begin_prompt(prompt):
        for slot in range(2):
            monkeypatch.setattr(llm.slots, "here", lambda slot=slot: llm.slots.all[slot])
            thread = threading.Thread(target=llm.set_seed, args=(99,))
            thread.start()
            thread.join(20)
            monkeypatch.undo()
        begin(prompt)

    monkeypatch.setattr(llm.slots.batcher, "begin_prompt", begin_prompt)
    assert llm.create_completion(WORDS[:50], seed=5, **SAMPLED)["choices"][0]["text"] == wanted


def test_seeds_go_on_as_upstreams(model, fresh, opened):
    llm, stock = opened(model), fresh()
    for each in (llm, stock):
        each.set_seed(3)
    for _ in range(3):
        texts = [said(each.create_completion(WORDS[:40], **SAMPLED)) for each in (llm, stock)]
        assert texts[0] == texts[1]
        assert llm._seed == stock._seed


# -- what each thread has for itself ---------------------------------------------------------------


def loop(llm, prompt, turns=lambda: None, n=8):
    """The loop of upstream's low-level examples; the answer, and what upstream's attributes say after it."""
    llm.reset()
    llm.eval(prompt)
    answer = []
    for _ in range(n):
        turns()
        answer.append(llm.sample(temp=0.0))
        turns()
        llm.eval([answer[-1]])
    return answer, llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_loops_of_eval_and_sample(model, opened, fresh, threads):
    llm, stock = opened(model), fresh()
    prompts = [WORDS[20 * i : 20 * i + 40 + i] for i in range(threads)]
    wanted = [loop(stock, prompt) for prompt in prompts]
    step = threading.Barrier(threads, timeout=60)
    assert together(*(lambda p=p: loop(llm, p, step.wait) for p in prompts)) == wanted


def test_a_token_is_sampled_where_the_slot_was_given_away(model, opened, fresh):
    llm, stock = opened(model), fresh()
    stock.eval(WORDS[:60])
    wanted = [stock.sample(temp=0.0)]
    stock.eval(wanted)
    wanted.append(stock.sample(temp=0.0))
    llm.eval(WORDS[:60])
    together(*(lambda i=i: ask(llm, WORDS[100 + i : 150]) for i in range(4)))
    got = [llm.sample(temp=0.0)]
    llm.eval(got)
    together(*(lambda i=i: llm.eval(WORDS[100 + i : 150]) for i in range(4)))
    assert [*got, llm.sample(temp=0.0)] == wanted


def test_a_token_is_sampled_where_the_slot_was_emptied(model, opened, fresh):
    llm, stock = opened(model), fresh()
    for each in (llm, stock):
        each.eval(WORDS[:60])
    llm._gate.alone(llm.slots.here().evaluation.runner.live.empty)
    together(lambda: ask(llm, WORDS[100:150]))
    assert llm.sample(temp=0.0) == stock.sample(temp=0.0)


def test_a_token_is_sampled_behind_fewer_tokens(model, opened, fresh):
    llm, stock = opened(model), fresh()
    llm.eval(WORDS[:61])
    llm.n_tokens = 60
    stock.eval(WORDS[:60])
    assert llm.sample(temp=0.0) == stock.sample(temp=0.0)


def test_generating_goes_on_behind_what_is_there(model, opened, fresh):
    def go_on(llm):
        start = threading.get_ident() % 2
        llm.eval(WORDS[start : start + 50])
        first = list(islice(llm.generate(WORDS[60:70], temp=0.0, reset=False), 5))
        return start, first, list(islice(llm.generate([5, 6], temp=0.0, reset=False), 5))

    llm, said = opened(model), []
    for _ in range(3):
        said += together(*[lambda: go_on(llm)] * 3)
    for start, first, second in said:
        stock = fresh()
        stock.eval(WORDS[start : start + 50])
        assert list(islice(stock.generate(WORDS[60:70], temp=0.0, reset=False), 5)) == first
        assert list(islice(stock.generate([5, 6], temp=0.0, reset=False), 5)) == second
        stock.close()


def test_rows_of_logits_are_the_threads_own(model, opened, fresh):
    llm, stock = opened(model, logits_all=True), fresh(logits_all=True)
    prompts = [WORDS[20 * i : 20 * i + 40] for i in range(3)]
    step = threading.Barrier(3, timeout=60)

    def rows(prompt):
        llm.reset()
        llm.eval(prompt)
        step.wait()
        llm.eval([9])
        step.wait()
        return llm.scores[: llm.n_tokens].copy(), np.array(llm.eval_logits), list(llm.eval_tokens)

    for prompt, (scores, logits, ids) in zip(
        prompts, together(*(lambda p=p: rows(p) for p in prompts)), strict=True
    ):
        stock.reset()
        stock.eval(prompt)
        stock.eval([9])
        assert ids == list(stock.eval_tokens)
        np.testing.assert_allclose(scores, stock.scores[: stock.n_tokens], atol=1e-3)
        np.testing.assert_allclose(logits, np.array(stock.eval_logits), atol=1e-3)


def test_a_saved_state_is_that_of_a_thread_whose_slot_was_given_away(model, opened):
    llm = opened(model)
    llm.eval(WORDS[:60])
    together(*(lambda i=i: ask(llm, WORDS[100 + i : 150]) for i in range(4)))
    state = llm.save_state()
    assert state.input_ids[: state.n_tokens].tolist() == WORDS[:60]
    llm.reset()
    llm.load_state(state)
    assert llm.input_ids[: llm.n_tokens].tolist() == WORDS[:60]


# -- completions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chats_in_threads(model, opened, fresh, stream):
    llm, stock = opened(model), fresh()
    wanted = [said(stock.create_chat_completion(chat, seed=5, **SAMPLED)) for chat in CHATS]
    for _ in range(3):
        made = together(
            *(
                lambda c=c: said(llm.create_chat_completion(c, seed=5, stream=stream, **SAMPLED))
                for c in CHATS
            )
        )
        assert made == wanted


def test_logprobs_in_threads(model, opened, fresh):
    llm, stock = opened(model, logits_all=True), fresh(logits_all=True)
    texts = ["some words", "other words", "no words"]

    def complete(each, text):
        return each.create_completion(text, logprobs=3, echo=True, seed=5, **SAMPLED)["choices"][0]

    wanted = [complete(stock, text) for text in texts]
    for _ in range(3):
        made = together(*(lambda t=t: complete(llm, t) for t in texts))
        for ours, theirs in zip(made, wanted, strict=True):
            assert ours["text"] == theirs["text"]
            assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
            assert ours["logprobs"]["token_logprobs"][1:] == pytest.approx(
                theirs["logprobs"]["token_logprobs"][1:], abs=1e-3
            )


def test_a_grammar_in_threads(model, opened, fresh):
    llm, stock = opened(model), fresh()
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "[" [0-9] ("," [0-9])* "]"', verbose=False)
    asked = {**SAMPLED, "max_tokens": 20, "grammar": grammar}
    wanted = [stock.create_completion(WORDS[:40], seed=s, **asked)["choices"][0]["text"] for s in range(4)]
    jobs = (
        lambda s=s: llm.create_completion(WORDS[:40], seed=s, **asked)["choices"][0]["text"] for s in range(4)
    )
    assert together(*jobs) == wanted
    assert all(text.startswith("[") for text in wanted)


def test_processors_and_criteria_find_their_own_request(model, opened, fresh):
    llm, stock = opened(model), fresh()

    def complete(each, start):
        told = []

        def process(ids, scores):
            n = each.n_tokens
            told.append((n, each.input_ids[:n].tolist(), each.detokenize(each.input_ids[:n].tolist())))
            scores[65 + each.tokenize(b"abc")[-1] % 7] += 2
            return scores

        def criterion(ids, _):
            told.append(len(ids))
            return len(ids) >= 36

        made = each.create_completion(
            WORDS[start : start + 30],
            seed=5,
            logits_processor=llama_cpp.LogitsProcessorList([process]),
            stopping_criteria=llama_cpp.StoppingCriteriaList([criterion]),
            **SAMPLED,
        )
        return made["choices"][0], told

    wanted = [complete(stock, start) for start in (0, 40, 80)]
    assert together(*(lambda s=s: complete(llm, s) for s in (0, 40, 80))) == wanted


def test_a_processor_may_ask_another_model(hybrid, opened):
    first, second = opened(hybrid), opened(hybrid)
    wanted = ask(second, WORDS[:30], 2)
    seen = []

    def process(_, scores):
        seen.append(ask(second, WORDS[:30], 2))
        return scores

    def complete(i):
        processors = llama_cpp.LogitsProcessorList([process])
        return first.create_completion(WORDS[i : i + 30], logits_processor=processors, **SAMPLED)

    together(*(lambda i=i: complete(i) for i in range(3)))
    assert len(seen) > 10
    assert all(words == wanted for words in seen)


def test_text_and_tokens_while_others_run(model, opened, fresh):
    llm, stock, over = opened(model), fresh(), threading.Event()
    texts = [f"some words, {i} of them" for i in range(20)]
    wanted = [stock.tokenize(text.encode()) for text in texts]

    def run():
        while not over.is_set():
            ask(llm, WORDS[:50])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert [llm.tokenize(text.encode()) for text in texts] == wanted
            assert [llm.detokenize(ids) for ids in wanted] == [stock.detokenize(ids) for ids in wanted]
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def test_embeddings_are_refused_as_clearly_as_upstream_does(hybrid, opened):
    with pytest.raises(ValueError, match="n_parallel"):
        opened(hybrid, embedding=True)
    llm = opened(hybrid)
    for ask_for in (llm.embed, llm.create_embedding):
        with pytest.raises(RuntimeError, match="embedding=True"):
            ask_for("some words")
    one = opened(hybrid, 1, embedding=True)
    assert len(one.embed("some words")) > 0


# -- as frameworks use it --------------------------------------------------------------------------


def test_a_pool_of_more_threads_than_slots(model, opened, fresh):
    """As LangChain's `batch` does: one completion each, streamed, from a pool of threads."""
    llm, stock = opened(model), fresh()
    prompts = [WORDS[5 * i : 5 * i + 30 + i] for i in range(16)]
    wanted = [said(stock.create_completion(p, seed=i, **SAMPLED)) for i, p in enumerate(prompts)]

    def complete(i):
        return said(llm.create_completion(prompts[i], seed=i, stream=True, **SAMPLED))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(complete, range(16))) == wanted


def test_streams_of_coroutines_whose_steps_run_in_any_thread(model, opened, fresh):
    """As servers do: each chunk is fetched in whatever thread of a pool is free."""
    llm, stock = opened(model), fresh()
    prompts = [WORDS[5 * i : 5 * i + 30 + i] for i in range(6)]
    wanted = [said(stock.create_completion(p, seed=i, **SAMPLED)) for i, p in enumerate(prompts)]

    async def complete(i):
        stream, chunks = llm.create_completion(prompts[i], seed=i, stream=True, **SAMPLED), []
        while (chunk := await asyncio.to_thread(next, stream, None)) is not None:
            chunks.append(chunk)
        return said(chunks)

    async def all_of_them():
        return await asyncio.gather(*(complete(i) for i in range(6)))

    assert asyncio.run(all_of_them()) == wanted
