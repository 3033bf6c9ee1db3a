"""Several requests at once: each is answered as if it had the model to itself, whatever the others do."""

import gc
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.engine import loaded
from llamahybrid.errors import Busy, ContextOverflow, ModelClosed, RequestCancelled
from llamahybrid.request import batcher as batcher_module
from llamahybrid.request.runner import RequestRunner

KINDS = {
    "qwen35": {},
    "mamba": {},
    "gemma3": {"swa_full": False},
    "gemma3-full": {},
    "llama": {},
    "deepseek4": {"type_k": 0, "type_v": 0},  # f16 makes other tokens of other batches (`parallel_fuzz`)
}
OPTIONS = {"n_ctx": 2048, "n_batch": 64, "n_threads": 1, "seed": 7, "verbose": False}
WORDS = np.random.default_rng(3).integers(1, 200, 400).tolist()


@pytest.fixture(params=KINDS)
def model(request, tiny_model):
    arch = request.param.removesuffix("-full")
    path = tiny_model(arch, **({"window": 16} if arch == "gemma3" else {}))
    return str(path), {**OPTIONS, **KINDS[request.param]}


@pytest.fixture
def hybrid(tiny_model):
    return str(tiny_model("qwen35")), OPTIONS


@pytest.fixture
def opened():
    made = []

    def open_one(model, n_parallel=3, **more):
        path, options = model
        made.append(Llama(path, n_parallel=n_parallel, **{**options, **more}))
        return made[-1]

    yield open_one
    for llm in made:
        llm.close()


class Stock:
    """What a fresh context of upstream's says."""

    def __init__(self, model):
        path, options = model
        self._llm = llama_cpp.Llama(path, **options)
        self._lock = threading.Lock()
        self._known = {}

    def __call__(self, prompt, n=8):
        with self._lock:
            known = self._known.get(tuple(prompt), [])
            if len(known) < n:
                self._llm.reset()
                known = list(islice(self._llm.generate(prompt, temp=0.0), n))
                self._known[tuple(prompt)] = known
            return known[:n]


def ask(llm, prompt, n=8):
    return list(islice(llm.generate(prompt, temp=0.0), n))


def together(*jobs):
    """Run jobs in threads of their own; what they returned."""
    all_there = threading.Barrier(len(jobs), timeout=60)  # else one that is through takes another job

    def run(job):
        all_there.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(120) for future in [pool.submit(run, job) for job in jobs]]


def test_chats_of_several_threads(model, opened):
    llm, stock = opened(model), Stock(model)

    def chat(seed):
        chance = random.Random(seed)
        history, wrong = WORDS[: chance.randrange(20, 200)], []
        for _ in range(4):
            history = [*history, *(chance.randrange(1, 200) for _ in range(chance.randrange(3, 40)))]
            n = chance.randrange(2, 10)
            said = ask(llm, history, n)
            if said != stock(history, n):
                wrong.append((seed, len(history), said))
            if chance.random() < 0.4:
                history = history[: chance.randrange(10, len(history))]
            else:
                history += said
        return wrong

    assert together(*(lambda seed=seed: chat(seed) for seed in range(5))) == [[]] * 5
    assert llm._gate.seated == []
    for slot in llm.slots.all:
        assert llm.slots.user(slot) is None
        assert slot.evaluation.runner.live.fault() is None or slot.evaluation.runner.live.state.is_invalid


def test_answers_are_decoded_together(model, opened, monkeypatch):
    llm, stock = opened(model), Stock(model)
    prompts = [WORDS[:50], WORDS[20:90], WORDS[:80]]
    begun = threading.Barrier(3, partial(monkeypatch.setattr, batcher_module, "GRACE_SECONDS", 60.0))

    def answer(prompt):
        stream = llm.generate(prompt, temp=0.0)
        first = next(stream)
        begun.wait(60)
        return [first, *islice(stream, 9)]

    said = together(*(lambda p=p: answer(p) for p in prompts))
    assert said == [stock(p, 10) for p in prompts]
    assert llm.slots.batcher.rows == 27
    assert llm.slots.batcher.cells.steps < 18


def test_open_generators_of_one_thread(model, opened):
    llm, stock = opened(model), Stock(model)
    prompts = [WORDS[:90], WORDS[50:120], WORDS[:60]]
    streams = [llm.generate(prompt, temp=0.0) for prompt in prompts]
    said = [[], [], []]
    for _ in range(6):
        for stream, words in zip(streams, said, strict=True):
            words.append(next(stream))
    assert said == [stock(prompt, 6) for prompt in prompts]
    assert [llm.slots.user(slot) is not None for slot in llm.slots.all] == [True] * 3


def test_where_batches_of_several_are_wrong_each_is_decoded_alone_unless_a_patch_mends_it(tiny_model, opened):
    model = str(tiny_model("plamo2")), OPTIONS
    llm, stock = opened(model), Stock(model)
    prompts = [WORDS[:50], WORDS[20:90], WORDS[:80]]
    assert together(*(lambda p=p: ask(llm, p, 20) for p in prompts)) == [stock(p, 20) for p in prompts]
    assert llm.slots.batcher.rows == 57
    assert (llm.slots.batcher.cells.steps < 57) == ("0030" in loaded.patches())


def test_one_more_than_there_are_slots_takes_turns(hybrid, opened):
    llm, stock = opened(hybrid, 2), Stock(hybrid)
    prompts = [WORDS[:90], WORDS[50:120], WORDS[:60]]
    streams = [llm.generate(prompt, temp=0.0) for prompt in prompts]
    said = [[], [], []]
    for _ in range(3):
        for stream, words in zip(streams, said, strict=True):
            words.append(next(stream))
    assert said == [stock(prompt, 3) for prompt in prompts]


def test_one_more_than_there_are_slots_may_be_refused(hybrid, opened):
    llm = opened(hybrid, 2, wait=False)
    llm._gate.seats.patience = 600.0
    started = []

    def hold(prompt):
        started.append(llm.generate(prompt, temp=0.0))
        return next(started[-1])

    together(lambda: hold(WORDS[:20]), lambda: hold(WORDS[5:20]))
    with pytest.raises(Busy):
        ask(llm, WORDS[:30])
    started.pop(0).close()
    assert ask(llm, WORDS[:30], 2)


def test_a_request_resumes_where_most_of_it_is_live(hybrid, opened):
    llm = opened(hybrid, prompt_cache=PromptCache(ram_bytes=0))
    chats = [[*WORDS[:100], *ask(llm, WORDS[:100])], [*WORDS[200:300], *ask(llm, WORDS[200:300])]]
    for chat in (chats[1], chats[0]):
        ask(llm, [*chat, 7, 8], 2)
        assert llm.last_request.cached == len(chat) - 1


def test_what_another_prompt_leaves_behind_is_waited_for(hybrid, opened):
    llm, over, begun = opened(hybrid), threading.Event(), threading.Event()

    def answer():  # between whose tokens the others' prompts are decoded piece by piece
        for _ in llm.generate(WORDS[300:350], temp=0.0):
            begun.set()
            if over.is_set():
                return

    def one(i):
        ask(llm, [*WORDS[:300], 10 + i, 20 + i], 2)
        return llm.last_request.cached

    thread = threading.Thread(target=answer)
    thread.start()
    assert begun.wait(60)
    try:
        cached = sorted(together(lambda: one(0), lambda: one(1)))
    finally:
        over.set()
        thread.join(60)
    assert cached[0] == 0
    assert cached[1] >= 256


@pytest.mark.parametrize("arch", ["qwen35", "lfm2", "gemma3"])
def test_what_a_running_answer_holds_of_a_prompt_is_shared(tiny_model, opened, arch):
    window = {} if arch == "qwen35" else {"window": 16}
    model = str(tiny_model(arch, **window)), {**OPTIONS, "swa_full": False}
    llm, stock = opened(model), Stock(model)
    running = llm.generate(WORDS[:300], temp=0.0)
    said = [next(running), next(running)]
    longer = [*WORDS[:300], 7, 8]
    assert ask(llm, longer, 4) == stock(longer, 4)
    assert llm.last_request.cached == 300
    assert [*said, *islice(running, 6)] == stock(WORDS[:300], 8)


def test_each_thread_has_its_own_last_request(hybrid, opened):
    llm = opened(hybrid)

    def one(n):
        ask(llm, WORDS[:n], 5)
        return llm.last_request.total

    lengths = [30, 50, 70]
    assert together(*(lambda n=n: one(n) for n in lengths)) == lengths


def test_upstreams_attributes_are_those_of_the_threads_own_request(hybrid, opened):
    llm = opened(hybrid)

    def one(n):
        stream = llm.generate(WORDS[:n], temp=0.0)
        first = next(stream)
        second = next(stream)
        seen = llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()
        stream.close()
        return seen == (n + 1, [*WORDS[:n], first]) and second >= 0

    assert together(*(lambda n=n: one(n) for n in (30, 50, 70))) == [True] * 3


def test_sampled_answers_of_a_seed(hybrid, opened):
    llm = opened(hybrid)
    alone = [llm.create_completion(WORDS[:40], max_tokens=6, seed=s, temperature=1.0) for s in range(3)]
    both = together(
        *(
            lambda s=s: llm.create_completion(WORDS[:40], max_tokens=6, seed=s, temperature=1.0)
            for s in range(3)
        )
    )
    texts = [[c["choices"][0]["text"] for c in some] for some in (alone, both)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_cancelling_one_of_several(hybrid, opened):
    llm, stock = opened(hybrid), Stock(hybrid)
    with llm.request() as handle:
        mine = llm.generate(WORDS[:50], temp=0.0)
    other = llm.generate(WORDS[20:90], temp=0.0)
    next(mine)
    first = next(other)
    handle.cancel()
    with pytest.raises(RequestCancelled):
        next(mine)
    assert [first, *islice(other, 4)] == stock(WORDS[20:90], 5)
    llm.cancel()
    with pytest.raises(RequestCancelled):
        next(other)


def test_generators_that_are_dropped_lose_no_slot(hybrid, opened):
    llm, stock = opened(hybrid, 2), Stock(hybrid)

    def drop(seed):
        for i in range(10):
            stream = llm.generate(WORDS[seed + i : 60], temp=0.0)
            next(stream)
            circle = [stream]
            circle.append(circle)
            del stream, circle
            if i % 3 == 0:
                gc.collect()

    together(*(lambda seed=seed: drop(seed) for seed in range(3)))
    gc.collect()
    prompts = [WORDS[:80], WORDS[30:110]]
    assert together(*(lambda p=p: ask(llm, p) for p in prompts)) == [stock(p) for p in prompts]
    assert llm._gate.seated == []


def test_a_thread_that_dies_in_the_middle_of_a_stream(hybrid, opened):
    llm, stock = opened(hybrid, 2), Stock(hybrid)
    left = []

    def die():
        stream = llm.generate(WORDS[:50], temp=0.0)
        next(stream)
        left.append(stream)

    for _ in range(3):
        together(die)
    llm._gate.seats.patience = 0.05
    assert ask(llm, WORDS[:70]) == stock(WORDS[:70])
    assert [next(left[0]), *islice(left[0], 2)] == stock(WORDS[:50], 4)[1:]


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_when_cells_run_out_the_youngest_waits_and_goes_on_with_the_same_text(tiny_model, opened, arch):
    model = str(tiny_model(arch)), {**OPTIONS, "n_ctx": 512}
    llm, stock = opened(model), Stock(model)
    prompts = [WORDS[:150], WORDS[100:260], WORDS[200:340]]
    assert llm.n_ctx() == 512
    said = together(*(lambda p=p: ask(llm, p, 60) for p in prompts))
    assert said == [stock(p, 60) for p in prompts]


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_prompt_and_an_answer_that_have_no_room_together(tiny_model, opened, arch):
    model = str(tiny_model(arch)), {**OPTIONS, "n_ctx": 512}
    llm, stock, begun = opened(model, 2), Stock(model), threading.Event()

    def answer():
        stream = llm.generate(WORDS[:150], temp=0.0)
        said = [next(stream)]
        begun.set()
        return [*said, *islice(stream, 59)]

    def ask_beside():
        assert begun.wait(60)
        return ask(llm, WORDS[40:392], 3)

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(answer), pool.submit(ask_beside)]
        try:
            said = [future.result(60) for future in both]
        finally:
            llm.cancel()
    assert said == [stock(WORDS[:150], 60), stock(WORDS[40:392], 3)]


def test_a_prompt_that_is_too_long_hurts_nobody_else(hybrid, opened):
    llm, stock = opened(hybrid, n_ctx=512), Stock(hybrid)
    other = llm.generate(WORDS[:100], temp=0.0)
    first = next(other)
    with pytest.raises(ContextOverflow):
        ask(llm, WORDS * 3)
    assert [first, *islice(other, 5)] == stock(WORDS[:100], 6)


# -- the whole context -----------------------------------------------------------------------------


def test_a_saved_state_is_the_threads_own(hybrid, opened):
    llm, stock = opened(hybrid), Stock(hybrid)
    ask(llm, WORDS[:80])
    llm.eval(WORDS[100:150])
    state = llm.save_state()
    llm.reset()
    ask(llm, WORDS[:60])
    llm.load_state(state)
    assert llm.input_ids[llm.n_tokens - 50 : llm.n_tokens].tolist() == WORDS[100:150]
    assert ask(llm, WORDS[:80]) == stock(WORDS[:80])


def test_what_was_moved_to_be_saved_goes_on(model, opened):
    llm, stock = opened(model), Stock(model)
    other = llm.generate(WORDS[:80], temp=0.0)
    said = [next(other)]
    llm.reset()
    llm.eval(WORDS[100:150])
    assert llm.slots.here() is not llm.slots.all[0]
    state = llm.save_state()
    assert ask(llm, WORDS[100:170]) == stock(WORDS[100:170])
    assert [*said, *islice(other, 5)] == stock(WORDS[:80], 6)
    llm.load_state(state)
    assert ask(llm, WORDS[100:160]) == stock(WORDS[100:160])


def test_what_is_stored_never_serves_where_bits_are_promised(hybrid, opened):
    cache = PromptCache()
    ask(opened(hybrid, prompt_cache=cache), WORDS[:200])
    alone = opened(hybrid, 1, prompt_cache=cache)
    ask(alone, WORDS[:200])
    assert alone.last_request.cached == 0


def test_closing_while_others_run(hybrid, opened):
    llm = opened(hybrid)
    ended = []

    def run(seed):
        try:
            for _ in llm.generate(WORDS[seed : seed + 60], temp=0.0):
                started.release()
        except (RequestCancelled, ModelClosed) as error:
            ended.append(type(error))

    started = threading.Semaphore(0)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(9):
        assert started.acquire(timeout=60)
    llm.close()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 3


def test_what_cannot_be(hybrid, opened):
    for more in ({"n_parallel": 0}, {"n_parallel": 2, "prompt_cache": False}, {"n_parallel": 64}):
        with pytest.raises(ValueError, match="n_parallel"):
            opened(hybrid, **more)


@pytest.fixture
def room_asked(monkeypatch):
    """For how many tokens room was asked, each time."""
    asked, wait = [], RequestRunner.wait_for_room

    def note(self, tokens):
        asked.append(tokens)
        wait(self, tokens)

    monkeypatch.setattr(RequestRunner, "wait_for_room", note)
    return asked


def test_what_gave_its_cells_away_and_was_parked_comes_back_when_there_is_room_for_all_of_it(
    hybrid, opened, room_asked
):
    llm, stock = opened(hybrid, 2), Stock(hybrid)
    stream = llm.generate(WORDS[:300], temp=0.0)
    said = [next(stream)]
    llm.slots.current.evaluation.runner.live.empty()
    others = [llm.generate(WORDS[i : i + 50], temp=0.0) for i in (50, 150)]
    for other in others:
        next(other)
    assert llm.slots.user(llm.slots.all[0]) is not None
    room_asked.clear()
    said += [next(stream) for _ in range(3)]
    assert room_asked[0] >= 300
    assert said == stock(WORDS[:300], 4)


def test_what_lost_its_memory_in_its_answer_asks_for_room_again(hybrid, opened, room_asked):
    llm, stock = opened(hybrid, 2), Stock(hybrid)
    stream = llm.generate(WORDS[:300], temp=0.0)
    said = [next(stream)]
    llm.slots.current.evaluation.runner.live.empty()
    room_asked.clear()
    said += [next(stream) for _ in range(3)]
    assert room_asked
    assert room_asked[0] >= 300
    assert said == stock(WORDS[:300], 4)


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_without_paging_no_slot_is_taken_for_its_scratch_space(tiny_model, opened, arch):
    model = str(tiny_model(arch)), OPTIONS
    llm, stock = opened(model, 3, paging=False), Stock(model)
    prompts = [WORDS[i : i + 80] for i in (0, 100, 200, 20)]
    for _ in range(2):
        assert [ask(llm, prompt) for prompt in prompts] == [stock(prompt) for prompt in prompts]
    for slot in llm.slots.all:
        live = slot.evaluation.runner.live
        assert live.profile.pager is None
        assert live.profile.linear
        assert live.n
        assert live.fault() is None


# -- interrupts ------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_of_one_leaves_the_others_alone(model, opened):
    llm, stock, over = opened(model), Stock(model), threading.Event()

    def client(seed):
        chance, wrong = random.Random(seed), []
        while not over.is_set():
            prompt = WORDS[: chance.randrange(20, 150)]
            n = chance.randrange(1, 8)
            said = ask(llm, prompt, n)
            if said != stock(prompt, n):
                wrong.append((len(prompt), said))
        return wrong

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    chance, hits = random.Random(5), 0
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(client, seed) for seed in range(2)]
        try:
            for _ in range(40):
                prompt, said = WORDS[: chance.randrange(20, 150)], []
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 10 ** chance.uniform(-3.5, -1.5))
                        for token in islice(llm.generate(prompt, temp=0.0), 8):
                            said.append(token)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
                assert said == stock(prompt, len(said)) if said else True
        finally:
            signal.signal(signal.SIGALRM, before)
            over.set()
        assert [other.result(120) for other in others] == [[], []]
    assert hits > 5
