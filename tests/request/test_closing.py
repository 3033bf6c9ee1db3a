"""Closed, collected and forked models: running native calls are waited for, later ones are refused."""

import gc
import threading
import weakref
from itertools import islice

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.core import loop
from llamahybrid.errors import ModelClosed
from tests.lab.waiting import wait_until
from tests.request.asking import DEADLINE, WORDS, Started, begin, in_thread, take

CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("prompt_cache", [None, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.create_completion([1, 2]),
        lambda llm: llm.create_chat_completion(CHAT, max_tokens=1),
        lambda llm: llm.warm("x"),
        lambda llm: llm.tokenize(b"x"),
        lambda llm: llm.tokenizer().tokenize(b"x"),
        lambda llm: llm.detokenize([5]),
        lambda llm: llm.token_eos(),
        lambda llm: llm.n_vocab(),
        lambda llm: llm.n_ctx(),
        lambda llm: llm.embed("x"),
        lambda llm: llm.eval([5]),
        lambda llm: llm.save_state(),
        lambda llm: list(llm.generate([5, 6])),
    ],
)
def test_nothing_reads_a_closed_model(opened, use, prompt_cache):
    llm = opened("llama", prompt_cache=prompt_cache)
    llm.create_completion([5, 6], max_tokens=2)
    llm.close()
    llm.close()
    with pytest.raises(ModelClosed):
        use(llm)
    llm.reset()
    assert llm.n_tokens == 0


def test_first_request_beside_a_close_is_refused(opened, monkeypatch):
    """The model is closed when the request was let in and its message is not sent yet."""
    llm = opened("llama")
    task = loop.Task

    def task_late(*arguments):
        in_thread(llm.close)
        return task(*arguments)

    monkeypatch.setattr(loop, "Task", task_late)
    with pytest.raises(ModelClosed):
        next(llm.generate([5, 6]))


def test_closed_model_without_a_cache_takes_no_state(opened):
    llm = opened("llama", prompt_cache=False)
    llm.eval([5, 6])
    state = llm.save_state()
    llm.close()
    with pytest.raises(ModelClosed):
        llm.load_state(state)


def test_open_stream_of_a_closed_model_is_refused_and_told_of_once(opened):
    llm, told = opened(), []
    llm.on_request = told.append
    stream, _ = begin(llm, WORDS[:60])
    parked, _ = begin(llm, WORDS[60:120])
    llm.close()
    for each in (stream, parked):
        with pytest.raises(ModelClosed):
            next(each)
        each.close()
    assert llm.last_request.generated == 1
    assert len(told) == 2


@pytest.mark.parametrize("slots", [1, 3])
def test_closing_ends_running_streams(opened, slots):
    llm, started = opened(n_parallel=slots), threading.Semaphore(0)

    def run(seed):
        while True:
            for _ in llm.create_completion(WORDS[seed : seed + 60], stream=True, max_tokens=900):
                started.release()

    threads = [Started(run, seed) for seed in range(slots)]
    for _ in range(3 * slots):
        assert started.acquire(timeout=DEADLINE)
    llm.close()
    assert llm.ctx is None
    for thread in threads:
        with pytest.raises(ModelClosed):
            thread.result()


def test_closing_ends_waiting_requests(opened, patient):
    llm = opened()
    held, _ = begin(llm, WORDS[:60])
    threads = [Started(take, llm, WORDS[60:120]) for _ in range(2)]
    llm.close()
    for thread in threads:
        with pytest.raises(ModelClosed):
            thread.result()
    held.close()


def test_threads_read_a_model_while_it_is_closed(opened):
    llm = opened("llama", n_ctx=2048)
    reads = threading.Semaphore(0)

    def read(use):
        while True:
            use()
            reads.release()

    text, chat = b"hello " * 3000, [{"role": "user", "content": "hello " * 100}]
    uses = [lambda: llm.tokenize(text), lambda: llm.create_chat_completion(chat, max_tokens=1)] * 2
    threads = [Started(read, use) for use in uses]
    for _ in range(8):
        assert reads.acquire(timeout=DEADLINE)
    llm.close()
    for thread in threads:
        with pytest.raises(ModelClosed):
            thread.result()


@pytest.mark.parametrize("where", ["callback", "finaliser"])
def test_request_cannot_close_its_own_model(opened, where):
    llm, refused = opened("llama"), []

    class Closing:
        def __del__(self):
            close()

    def close():
        try:
            llm.close()
        except RuntimeError as error:
            refused.append(str(error))

    def criterion(*_):
        if where == "callback":
            close()
        else:
            Closing().cycle = None
            gc.collect()
        return True

    llm.create_completion([5, 6], stopping_criteria=llama_cpp.StoppingCriteriaList([criterion]))
    assert refused
    assert llm.create_completion([5], max_tokens=1), "nothing was closed"


def test_unused_model_is_freed(tiny_model):
    llm = Llama(str(tiny_model("qwen35")), n_ctx=512, n_threads=1, verbose=False)
    list(islice(llm.generate(WORDS[:60], temp=0.0), 2))
    gone = weakref.ref(llm)
    gc.disable()
    try:
        del llm
        wait_until(lambda: gone() is None)  # its thread may still end the stream
    finally:
        gc.enable()


def test_tokenizer_of_a_model_that_is_gone(tiny_model):
    tokenizer = Llama(str(tiny_model("llama")), n_ctx=64, n_threads=1, verbose=False).tokenizer()
    gc.collect()
    with pytest.raises(ModelClosed):
        tokenizer.tokenize(b"x")
