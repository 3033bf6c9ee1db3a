"""What reads a model outside of requests: waited for by `close`, refused after it, never left behind."""

import gc
import os
import threading
import time

import pytest

from llamahybrid.errors import ModelClosed
from llamahybrid.request.native_calls import NativeCalls, held, piece

CHAT = [{"role": "user", "content": "x"}]


class Reader:
    """Something with a method that `end` waits for."""

    def __init__(self, calls):
        self._calls = calls

    @held
    def read(self, work):
        return work()


@pytest.fixture
def calls():
    return NativeCalls()


@pytest.fixture(params=["run", "held"])
def read(request, calls):
    """Both ways of making a call."""
    return calls.run if request.param == "run" else Reader(calls).read


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# -- one call after the other ------------------------------------------------------------------------


def test_a_call_leaves_nothing_behind(calls, read):
    assert read(lambda: 5) == 5
    with pytest.raises(KeyError):
        read(lambda: {}["x"])
    assert not calls.frames


def test_calls_are_refused_after_the_end(calls, read):
    calls.end()
    calls.end()
    with pytest.raises(ModelClosed):
        read(int)
    assert not calls.frames


def test_the_end_waits_for_calls_of_other_threads(calls, read):
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work():
        inside.set()
        assert go_on.wait(60)
        return not ended.is_set()

    result = []
    reader = in_thread(lambda: result.append(read(work)))
    assert inside.wait(60)

    def end():
        calls.end()
        ended.set()

    closer = in_thread(end)
    while not calls.closed:
        time.sleep(0.001)
    assert not ended.wait(0.05), "a call runs"
    with pytest.raises(ModelClosed):
        read(int)
    go_on.set()
    reader.join(60)
    closer.join(60)
    assert ended.is_set()
    assert result == [True]


def test_the_end_waits_for_no_call_that_an_interrupt_ended(calls, monkeypatch):
    class Kept(set):
        def discard(self, frame):
            raise KeyboardInterrupt

    calls.frames = Kept()
    with pytest.raises(KeyboardInterrupt):
        calls.run(int)
    assert calls.frames
    calls.end()
    assert not calls.frames


def test_a_call_cannot_be_ended_from_inside(calls, read):
    with pytest.raises(RuntimeError, match="inside"):
        read(calls.end)
    assert not calls.closed
    assert not read(calls.end_unless_running)
    assert read(lambda: 5) == 5
    assert calls.end_unless_running()
    assert calls.end_unless_running()
    with pytest.raises(ModelClosed):
        read(int)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_has_no_calls_of_other_threads(calls, read):
    inside, go_on = threading.Event(), threading.Event()
    reader = in_thread(lambda: read(lambda: inside.set() or go_on.wait(60)))
    assert inside.wait(60)

    def child():
        if (pid := os.fork()) == 0:
            os._exit(0 if len(calls.frames) == 1 else 1)
        return os.waitpid(pid, 0)[1]

    assert read(child) == 0, "its own, and no other"
    go_on.set()
    reader.join(60)


# -- a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.create_chat_completion(CHAT, max_tokens=1),
        lambda llm: llm.warm("x"),
        lambda llm: llm.tokenize(b"x"),
        lambda llm: llm.tokenizer().tokenize(b"x"),
        lambda llm: llm.detokenize([5]),
        lambda llm: llm.token_eos(),
        lambda llm: llm.n_vocab(),
        lambda llm: llm.n_ctx(),
        lambda llm: llm.pooling_type(),
        lambda llm: llm.embed("x"),
        lambda llm: llm.eval([5]),
        lambda llm: llm.save_state(),
        lambda llm: llm._init_sampler(temp=0.0),
        lambda llm: list(llm.generate([5, 6])),
    ],
)
@pytest.mark.parametrize("prompt_cache", [None, False])
def test_nothing_reads_a_closed_model(open_model, use, prompt_cache):
    llm = open_model("llama", prompt_cache=prompt_cache)
    llm.create_completion([5, 6], max_tokens=2)
    llm.close()
    with pytest.raises(ModelClosed):
        use(llm)
    llm.reset()
    assert llm.n_tokens == 0


def test_a_model_without_a_cache_that_was_closed_takes_no_state(open_model):
    llm = open_model("llama", prompt_cache=False)
    llm.eval([5, 6])
    state = llm.save_state()
    llm.close()
    with pytest.raises(ModelClosed):
        llm.load_state(state)


def test_threads_read_a_model_while_it_is_closed(open_model):
    llm = open_model("llama", n_ctx=2048)
    ends = []

    def read(use):
        try:
            while True:
                use()
        except ModelClosed:
            ends.append(True)

    text = b"hello " * 3000
    chat = [{"role": "user", "content": "hello " * 100}]
    uses = [lambda: llm.tokenize(text), lambda: llm.create_chat_completion(chat, max_tokens=1)] * 2
    threads = [in_thread(lambda use=use: read(use)) for use in uses]
    time.sleep(0.1)
    llm.close()
    for thread in threads:
        thread.join(60)
    assert ends == [True] * 4


def test_the_step_that_close_waits_for_reads_on(open_model):
    llm = open_model("llama")
    inside, read = threading.Event(), []

    def criterion(ids, _scores):
        inside.set()
        deadline = time.monotonic() + 60
        while not llm.requests.gate.closed and time.monotonic() < deadline:
            time.sleep(0.001)
        read.append(llm.detokenize(ids.tolist()))
        return True

    def answer():
        llm.create_completion([5, 6], max_tokens=5, stopping_criteria=criterion)

    thread = in_thread(answer)
    assert inside.wait(60)
    llm.close()
    thread.join(60)
    assert read
    assert llm.last_request.reason


def test_a_finaliser_cannot_close_the_model_that_its_thread_reads(open_model):
    llm = open_model("llama")
    refused = []

    class Closing:
        def __del__(self):
            try:
                llm.close()
            except RuntimeError as error:
                refused.append(str(error))

    def collect():
        Closing().cycle = None
        gc.collect()

    llm._calls.run(collect)
    assert len(refused) == 1
    assert llm.tokenize(b"x")
    assert llm.create_completion([5], max_tokens=1), "nothing was closed"
    llm.close()


def test_a_model_that_nobody_holds_lives_while_it_is_read(tiny_model):
    from llamahybrid import Llama

    llm = Llama(str(tiny_model("llama")), n_ctx=64, n_threads=1, verbose=False)
    tokenizer, model, kept = llm.tokenizer(), llm._model, [llm]
    expected = llm.tokenize(b"hello", special=True)
    del llm

    def drop():
        kept.clear()
        gc.collect()
        return model.model is not None

    assert model._calls.run(drop), "freed while it was read"
    assert tokenizer.tokenize(b"hello") == expected


def test_a_tokenizer_of_a_model_that_is_gone(tiny_model):
    from llamahybrid import Llama

    tokenizer = Llama(str(tiny_model("llama")), n_ctx=64, n_threads=1, verbose=False).tokenizer()
    gc.collect()
    with pytest.raises(ModelClosed):
        tokenizer.tokenize(b"x")


def test_a_piece(open_model):
    llm = open_model("llama")
    token = llm.tokenize(b"x", add_bos=False)[-1]
    assert piece(llm._model, token).strip() == "x"
    llm.close()
    assert piece(llm._model, token) == str(token)
