"""What users of llama_cpp.Llama do holds with several requests at once, as on a fresh one of upstream's."""

import threading
from itertools import islice

import llama_cpp
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
            monkeypatch.setattr(llm.slots.batcher, "wait_for_room", cancelled)
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
    llm._gate.patience = 0
    together(*(lambda i=i: [llm._gate.alone(int), ask(llm, WORDS[i : i + 30])] for i in range(2)))
    ask(llm, WORDS[:20])  # its own thread wants something else
    others = [llm.generate(WORDS[i : i + 30], temp=0.0) for i in range(2)]
    assert [next(other) for other in others]

    def cancelled(*_):
        handle.cancel()
        llm._gate.check()

    monkeypatch.setattr(llm.slots.batcher, "wait_for_room", cancelled)
    *_, last = stream
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "cancelled"


def test_a_seed_that_is_set_beside_a_request_is_not_the_requests(hybrid, opened, monkeypatch):
    """`set_seed` is for the next request, whatever slot the calling thread used last."""
    llm = opened(hybrid)
    wanted = llm.create_completion(WORDS[:50], seed=5, **SAMPLED)["choices"][0]["text"]
    ask(llm, WORDS[100:140], 2)
    begin = llm.slots.batcher.begin_prompt

    def begin_prompt():
        for slot in range(2):
            monkeypatch.setattr(llm.slots, "here", lambda slot=slot: llm.slots.all[slot])
            thread = threading.Thread(target=llm.set_seed, args=(99,))
            thread.start()
            thread.join(20)
            monkeypatch.undo()
        begin()

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
