"""Who has cells, and whose go when they run out."""

import itertools
import threading
from functools import partial

import numpy as np
import pytest

from llamahybrid import PromptCache
from llamahybrid.capi.calls import NativeContext
from llamahybrid.capi.shim import library
from llamahybrid.prompt_cache.base import Costs
from llamahybrid.request import cells
from llamahybrid.request import runner as runner_module
from llamahybrid.request.cells import LEAST_LOADING, MASKED_SHARE, keep_seconds
from llamahybrid.request.job import Job, NoRoom
from llamahybrid.request.step_frames import Step
from tests.lab.real_costs import decide_by


@pytest.fixture
def masked(monkeypatch):
    """Each token is computed with the cells of all, as on stock."""
    monkeypatch.setattr(NativeContext, "attends_by_seq", lambda self: False)


WORDS = np.random.default_rng(1).integers(1, 200, 400).tolist()


def test_the_youngest_job_loses_its_cells(open_slots):
    llm = open_slots("llama", 3)
    batcher, slots = llm.slots.batcher, llm.slots.all
    streams = [llm.generate(WORDS[i : i + 100], temp=0.0) for i in (0, 100, 200)]
    for stream in streams:
        next(stream)
    tickets = [llm.slots.user(slot) for slot in slots]
    lives = [slot.evaluation.runner.live for slot in slots]
    jobs = [Job(t, live, 5) for t, live in zip(tickets, lives, strict=True)]
    batcher.cells.cells = sum(live.n for live in lives) + 1
    youngest = max(jobs, key=lambda job: job.ticket.born)
    assert batcher.cells.that_fit(jobs) == [job for job in jobs if job is not youngest]
    assert isinstance(youngest.error, NoRoom)
    assert youngest.live.n == 0
    assert [job.live.n for job in jobs if job is not youngest] == [100, 100]
    for stream in streams:
        stream.close()


def test_memory_without_cells_is_never_full(open_slots):
    assert open_slots("mamba").slots.batcher.cells.free() > 1 << 20


def ask(llm, prompt, n=3):
    return list(itertools.islice(llm.generate(prompt, temp=0.0), n))


def held(llm):
    return [slot.evaluation.runner.live.n for slot in llm.slots.all]


@pytest.mark.parametrize("arch", ["qwen35", "llama", "gemma3"])
def test_an_idle_slot_gives_way_to_a_long_prompt_and_its_chat_goes_on(open_slots, masked, arch):
    llm = open_slots(arch, 2)
    decide_by(llm)
    first = WORDS[:100] + ask(llm, WORDS[:100])
    ask(llm, WORDS[100:300])
    assert sorted(held(llm))[0] == 0, "its cells are gone"
    fresh = open_slots(arch, 2)
    assert ask(llm, [*first, 7]) == ask(fresh, [*first, 7])
    report = llm.last_request
    assert report.cached >= len(first) - 1


def test_it_stays_beside_a_short_one_and_where_masked_cells_cost_nothing(open_slots, masked):
    for options, short in (({}, True), ({"flash_attn": True}, False)):
        llm = open_slots("qwen35", 2, **options)
        decide_by(llm)
        ask(llm, WORDS[:100])
        ask(llm, WORDS[100:110] if short else WORDS[100:300])
        assert sorted(held(llm))[0] > 0


def test_a_slot_loses_nothing_that_the_cache_has_not_got(open_slots):
    llm = open_slots("qwen35", 2, prompt_cache=PromptCache(ram_bytes=1000))
    decide_by(llm)
    first = WORDS[:100] + ask(llm, WORDS[:100])
    ask(llm, WORDS[100:300])
    ask(llm, [*first, 7])
    assert llm.last_request.cached == len(first) - 1


def test_what_a_chat_handler_has_decoded_stays(open_slots):
    llm = open_slots("qwen35", 3)
    decide_by(llm)
    ask(llm, WORDS[:100])
    idle = next(slot for slot in llm.slots.all if slot.evaluation.runner.live.n)
    idle.evaluation.handoff = True
    other = threading.Thread(target=ask, args=(llm, WORDS[100:300]))
    other.start()
    other.join()
    assert idle.evaluation.runner.live.tokens[:100].tolist() == WORDS[:100]


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_it_stays_where_each_sequence_attends_to_its_own_cells(open_slots, arch):
    """Not with sliding windows, nor on stock."""
    llm = open_slots(arch, 2)
    decide_by(llm)
    ask(llm, WORDS[:100])
    ask(llm, WORDS[100:300])
    apart = arch == "qwen35" and "llama_attends_by_seq" in library().optional
    assert (sorted(held(llm))[0] > 0) == apart


def test_it_gives_way_to_a_long_answer(open_slots, monkeypatch, masked):
    monkeypatch.setattr(cells, "LOOK_STEPS", 8)
    llm = open_slots("qwen35", 2)
    decide_by(llm)
    ask(llm, WORDS[:100])
    ask(llm, WORDS[100:110])
    assert min(held(llm)) > 0
    ask(llm, WORDS[100:110], 60)
    assert min(held(llm)) == 0


def test_how_long_cells_are_kept_follows_from_costs():
    assert keep_seconds(Costs(), 100) == pytest.approx(LEAST_LOADING / (100 * MASKED_SHARE))
    costs = Costs(restore_seconds=2e-3, segment_seconds=1e-5, snapshot_seconds=9.0)
    assert keep_seconds(costs, 100) == pytest.approx(3e-3 / (100 * MASKED_SHARE))
    assert keep_seconds(costs, 10_000) == pytest.approx(0.102 / (10_000 * MASKED_SHARE))
    unmeasured = Costs(snapshot_seconds=4e-3)
    assert keep_seconds(unmeasured, 1000) == pytest.approx(4e-3 / (1000 * MASKED_SHARE))


def elsewhere(work):
    """`work()` in another thread, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)


@pytest.fixture
def when_it_waits(monkeypatch):
    """`when_it_waits(llm, deed)`: that is done in another thread as soon as somebody waits for cells."""

    def prepare(llm, deed):
        gate, done = llm.requests.gate, []
        step_aside = gate.step_aside

        def first(wait):
            elsewhere(deed)
            wait()

        def aside(ticket, wait):
            if done or not llm.slots.batcher.cells._short:
                return step_aside(ticket, wait)
            done.append(ticket)
            return step_aside(ticket, lambda: first(wait))

        monkeypatch.setattr(gate, "step_aside", aside)
        return done

    return prepare


@pytest.fixture
def loads(monkeypatch):
    """The plans that are carried out."""
    seen, load = [], runner_module.apply_plan
    monkeypatch.setattr(runner_module, "apply_plan", lambda *args: (seen.append(args[1]), load(*args))[1])
    return seen


def test_who_counts_on_cells_of_another_sees_it_go(open_slots, when_it_waits, loads):
    llm = open_slots("qwen35", 4, n_ctx=512)
    llm.requests.gate.seats.patience = 600.0
    for end in (9, 8):
        ask(llm, [*WORDS[:300], end])
    lender, holds = (llm.generate(p, temp=0.0) for p in ([*WORDS[:300], 6], WORDS[220:400]))
    for stream in (holds, lender):
        elsewhere(lambda s=stream: list(itertools.islice(s, 2)))
    cells = llm.slots.batcher.cells
    loads.clear()

    def end_and_take():
        lender.close()
        cells.cells -= 200

    waited = when_it_waits(llm, end_and_take)
    said = []
    thread = threading.Thread(target=lambda: said.extend(ask(llm, [*WORDS[:300], *WORDS[300:360]])))
    thread.start()
    while not waited and thread.is_alive():
        thread.join(0.01)
    thread.join(0.5)
    assert waited
    assert loads == [], "there is no room for it"
    cells.cells += 200
    holds.close()
    thread.join(60)
    assert len(said) == 3


@pytest.fixture
def three(open_slots):
    """Three requests, oldest first, with a token each that waits; no cell is free."""
    llm = open_slots("llama", 3)
    streams = [llm.generate(WORDS[i : i + 100], temp=0.0) for i in (0, 100, 200)]
    for stream in streams:
        next(stream)
    jobs = [Job(llm.slots.user(slot), slot.evaluation.runner.live, 5) for slot in llm.slots.all]
    jobs.sort(key=lambda job: job.ticket.born)
    llm.slots.batcher.cells.cells = sum(job.live.n for job in jobs)
    llm.requests.gate.seats.patience = 600.0
    yield llm, jobs
    for job in jobs:
        job.ticket.step = None
    for stream in streams:
        stream.close()


class Waits(Exception):
    """It would wait."""


def test_a_prompt_takes_cells_from_younger_answers_alone(three, monkeypatch):
    llm, (oldest, middle, youngest) = three
    batcher, gate = llm.slots.batcher, llm.requests.gate

    def aside(*_):
        raise Waits

    monkeypatch.setattr(gate, "step_aside", aside)
    monkeypatch.setattr(gate.seats, "current", middle.ticket)
    for jobs, lost in (([oldest, youngest], youngest), ([oldest], None)):
        batcher.cells.cells = sum(live.n for live in batcher._shared.members)
        wait = partial(batcher.cells.wait_for_batch, middle.live, middle.live.n, 1, lambda jobs=jobs: jobs)
        if lost is None:
            with pytest.raises(Waits):
                wait()
        else:
            wait()
            assert isinstance(lost.error, NoRoom)
    assert not oldest.done
    assert oldest.live.n == middle.live.n == 100


@pytest.mark.parametrize("where", ["pausing", "_short"])
def test_a_younger_prompt_that_waits_loses_its_cells_to_a_step(three, where):
    llm, (oldest, middle, youngest) = three
    cells = llm.slots.batcher.cells
    youngest.ticket.step = Step()
    getattr(cells, where)[youngest.ticket] = youngest.live
    assert cells.that_fit([oldest, middle]) == [oldest, middle]
    getattr(cells, where).clear()
    assert (oldest.live.n, middle.live.n, youngest.live.n) == (100, 100, 0)


@pytest.fixture
def asked(three, monkeypatch):
    """`asked(job, first)`: a job's request asks for one of many free cells while `first`'s waits."""
    llm, _ = three
    cells, gate = llm.slots.batcher.cells, llm.requests.gate
    cells.cells += 100

    def aside(*_):
        raise Waits

    def ask_for_one(job, first, batch=False):
        monkeypatch.setattr(gate, "step_aside", aside)
        monkeypatch.setattr(gate.seats, "current", job.ticket)
        first.ticket.step = Step()
        cells._short[first.ticket] = first.live
        try:
            if batch:
                cells.wait_for_batch(job.live, job.live.n, 1, list)
            else:
                cells.wait(job.live, lambda: 1)
        finally:
            cells._short.clear()
            monkeypatch.undo()

    return ask_for_one


@pytest.mark.parametrize("batch", [False, True])
def test_who_has_nothing_yet_waits_behind_older_ones_alone(three, asked, batch):
    """Else those that come later have what is free, each time, and the one that waits never comes back."""
    _, (oldest, middle, youngest) = three
    middle.live.empty()
    with pytest.raises(Waits):
        asked(middle, oldest, batch)
    asked(middle, youngest, batch)


def test_who_holds_cells_goes_on_with_its_prompt_and_so_does_what_was_decoded_natively(three, asked):
    _, (oldest, middle, _) = three
    asked(middle, oldest, batch=True)
    middle.ticket.rests_on = middle.live.tokens
    asked(middle, oldest)
    middle.ticket.rests_on = None


def test_what_lies_where_a_younger_one_waits_to_begin_is_idle(three, monkeypatch):
    llm, (oldest, _, youngest) = three
    cells = llm.slots.batcher.cells
    monkeypatch.setattr(llm.requests.gate.seats, "current", oldest.ticket)
    cells._prompts[youngest.ticket] = youngest.live.tokens
    youngest.ticket.request = None
    assert not cells._empty_idle(oldest.live), "it decodes its prompt"
    cells._short[youngest.ticket] = youngest.live
    assert cells._empty_idle(oldest.live)
    cells._short.clear()
    cells._prompts.clear()
    assert youngest.live.n == 0
