"""What is decoded next: a step of all answers, a piece of one prompt; whose cells go when they run out."""

import threading
import time
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest

from llamahybrid.errors import DecodeError, RequestCancelled
from llamahybrid.memory.compute_thread import ComputeThread
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.shared import SharedContext
from llamahybrid.prompt_cache.base import Costs
from llamahybrid.request import assembly, pieces
from llamahybrid.request import batcher as batcher_module
from llamahybrid.request import runner as runner_module
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.job import Job, NoRoom
from llamahybrid.request.line import POLL
from llamahybrid.request.step_frames import Step
from llamahybrid.request.ticket import Ticket

WORDS = np.random.default_rng(1).integers(1, 200, 400).tolist()


def have_taken(lately, seconds):
    for _ in range(2):
        lately.took(seconds)


def ask(llm, prompt, n=6):
    return list(islice(llm.generate(prompt, temp=0.0), n))


def test_a_prompt_alone_is_cut_into_whole_batches(open_slots):
    batcher = open_slots().slots.batcher
    assert batcher.piece_of(256) == 256


def test_beside_answers_a_prompt_is_cut_into_pieces(open_slots, monkeypatch):
    llm = open_slots()
    batcher = llm.slots.batcher
    stream = llm.generate(WORDS[:50], temp=0.0)
    list(islice(stream, 3))
    monkeypatch.setattr(batcher._meter, "costs", lambda: Costs(prefill_seconds=0.01))
    have_taken(batcher._one_step, 0.02)  # 0.4 seconds are 40 tokens
    have_taken(batcher._prompt_token, 0.01)
    assert batcher.piece_of(256) == 37
    have_taken(batcher._one_step, 0.1)  # and 16 steps 160
    assert batcher.piece_of(256) == 128
    have_taken(batcher._prompt_token, 0.02)  # by the last pieces, whatever the fastest ever took
    assert batcher.piece_of(256) == 64
    stream.close()
    assert batcher.piece_of(256) == 256


def test_answers_have_a_step_between_two_pieces_of_a_prompt(open_slots, monkeypatch):
    monkeypatch.setattr(batcher_module, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(pieces, "PIECE_STEPS", 0)  # else small ones follow each other
    monkeypatch.setattr(pieces, "PIECE_SECONDS", 0.0)
    llm = open_slots(n_batch=64)
    order, over = [], threading.Event()
    append, piece = llm.slots.batcher.append, llm.slots.batcher.piece
    monkeypatch.setattr(llm.slots.batcher, "append", lambda *a: (append(*a), order.append("answer")))
    monkeypatch.setattr(llm.slots.batcher, "piece", lambda *a: (order.append("piece"), piece(*a))[1])
    begun = threading.Event()

    def answer():
        for _ in llm.generate(WORDS[:50], temp=0.0):
            begun.set()
            if over.is_set():
                break

    thread = threading.Thread(target=answer)
    thread.start()
    begun.wait(60)
    order.clear()
    ask(llm, WORDS[50:350], 1)
    seen = list(order)
    over.set()
    thread.join(60)
    last = max(i for i, what in enumerate(seen) if what == "piece")
    longest = max(len(run) for run in "".join(w[0] for w in seen[:last]).split("a"))
    assert seen.count("piece") > 4
    assert longest <= 2


def test_answers_have_what_a_step_gave_them_before_the_next_piece(open_slots, monkeypatch):
    """A piece has the lock for long: a token that is decoded and not fetched would come one piece later."""
    monkeypatch.setattr(pieces, "PIECE_STEPS", 0)
    monkeypatch.setattr(pieces, "PIECE_SECONDS", 0.0)
    llm = open_slots(n_batch=64, n_parallel=3)
    batcher, order, over = llm.slots.batcher, [], threading.Event()
    append, begins = batcher.append, batcher.cells.wait_for_batch
    monkeypatch.setattr(batcher, "append", lambda *a: (append(*a), order.append(threading.get_ident())))
    monkeypatch.setattr(batcher.cells, "wait_for_batch", lambda *a: (begins(*a), order.append("piece")))
    begun = threading.Barrier(3, partial(monkeypatch.setattr, batcher_module, "GRACE_SECONDS", 60.0))

    def answer(prompt):
        for count, _ in enumerate(llm.generate(prompt, temp=0.0)):
            if count == 2:
                begun.wait(60)
            if over.is_set():
                break

    threads = [threading.Thread(target=answer, args=(WORDS[50 * i : 50 * i + 50],)) for i in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    order.clear()
    ask(llm, WORDS[100:400], 1)
    seen = list(order)
    monkeypatch.setattr(batcher_module, "GRACE_SECONDS", 0.0)
    over.set()
    for thread in threads:
        thread.join(60)
    at = [i for i, what in enumerate(seen) if what == "piece"]
    assert len(at) > 4
    for one, next_one in pairwise(at[1:]):
        assert set(seen[one + 1 : next_one]) == {thread.ident for thread in threads}


def test_an_answer_that_is_decoded_alone_goes_once_for_each_step_of_the_others(open_slots, monkeypatch):
    """Its tokens, whose rows are all wanted, take no prompt's turn: that is half a second."""
    monkeypatch.setattr(pieces, "PIECE_SECONDS", 60.0)
    monkeypatch.setattr(batcher_module, "GRACE_SECONDS", 60.0)
    llm = open_slots()
    llm.requests.logprobs_on_request = True
    batcher, order, alone_is_in = llm.slots.batcher, [], threading.Event()
    stepped, begins = batcher._stepped, batcher.cells.wait_for_batch
    monkeypatch.setattr(batcher, "_stepped", lambda *a: (stepped(*a), order.append("step")))

    def wait_for_batch(live, position, tokens, jobs):
        order.append("alone" if tokens == 1 else "prompt")
        begins(live, position, tokens, jobs)

    monkeypatch.setattr(batcher.cells, "wait_for_batch", wait_for_batch)
    often = {"temperature": 0.0, "max_tokens": 60, "stream": True, "logit_bias": {llm.token_eos(): -100.0}}

    def plain():
        stream = llm.create_completion(WORDS[:30], **often)
        for count, _ in enumerate(stream):
            if count == 2:
                assert alone_is_in.wait(60)

    thread = threading.Thread(target=plain)
    thread.start()
    for _ in llm.create_completion(WORDS[100:130], logprobs=1, **often):
        alone_is_in.set()
    thread.join(60)
    last = max(i for i, what in enumerate(order) if what == "step")
    first = order.index("alone")
    together = "".join(what[0] for what in order[first:last])
    assert order.count("alone") > 40
    assert "aa" not in together


def test_an_answer_that_is_decoded_alone_is_waited_for_by_no_step(open_slots):
    batcher, ticket = open_slots().slots.batcher, Ticket()
    ticket.step, batcher._answering[ticket] = Step(), 0.0
    assert batcher._expects_more()
    ticket.alone_at = batcher.cells.steps
    assert not batcher._expects_more()


def test_an_answer_that_was_decoded_alone_once_is_waited_for_again(open_slots):
    llm = open_slots()
    streams = [llm.generate(WORDS[50 * i : 50 * i + 50], temp=0.0) for i in range(2)]
    for stream in streams:
        next(stream)
    ticket = next(iter(llm.slots.batcher._answering))
    ticket.alone_at = 0
    next(streams[0])
    assert ticket.alone_at is None


def test_who_waits_for_tokens_to_be_fetched_is_told_when_they_are(open_slots, monkeypatch):
    llm = open_slots()
    streams = [llm.generate(WORDS[50 * i : 50 * i + 50], temp=0.0) for i in range(2)]
    for stream in streams:
        next(stream)
    batcher, owed = llm.slots.batcher, []
    monkeypatch.setattr(batcher._pieces, "ring", lambda: owed.append(len(batcher._untold)))
    next(streams[0])
    assert owed == [1, 0]


def test_of_two_that_wait_for_a_piece_the_first_goes_first(open_slots):
    """However often each comes back: the last to come would have the other one wait until it is through."""
    batcher, first, second = open_slots().slots.batcher, Ticket(), Ticket()
    first.step = second.step = Step()
    for ticket in (first, second):
        batcher._pieces.enter(ticket, 64)
    assert [batcher._goes(ticket, 64) for ticket in (first, second)] == [True, False]


def test_a_prompt_that_came_before_an_answer_began_is_decoded_before_its_first_step(open_slots, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_STEPS", 0)  # else one between two pieces
    monkeypatch.setattr(pieces, "PIECE_SECONDS", 0.0)
    monkeypatch.setattr(pieces, "BURST_SECONDS", 60.0)
    llm = open_slots(n_batch=64)
    batcher, order, both = llm.slots.batcher, [], threading.Event()
    append, piece = batcher.append, batcher.piece

    def piece_of_the_first(*args):
        both.set()
        while not order and not llm._gate.crowded:
            time.sleep(0.01)
        order.append("piece")
        return piece(*args)

    monkeypatch.setattr(batcher, "piece", piece_of_the_first)
    monkeypatch.setattr(batcher, "append", lambda *a: (append(*a), order.append("answer")))
    first = threading.Thread(target=ask, args=(llm, WORDS[:60]))
    first.start()
    both.wait(60)
    ask(llm, WORDS[100:400])
    first.join(60)
    pieces_of_both = order.count("piece")
    assert pieces_of_both >= 5
    assert order[:pieces_of_both] == ["piece"] * pieces_of_both


def test_a_step_of_all_waits_a_little_for_those_at_the_door(open_slots, monkeypatch):
    """They bring a prompt, mostly, and go on together with those that are here when it is decoded."""
    slots = open_slots().slots
    batcher, ticket = slots.batcher, Ticket()
    batcher._jobs[ticket] = Job(ticket, slots.all[0].evaluation.runner.live, 1)
    batcher._answering[ticket] = 0.0
    batcher._since = batcher_module.time.monotonic()
    monkeypatch.setattr(batcher_module, "GRACE_SECONDS", 60.0)
    assert batcher._ready()
    monkeypatch.setattr(RequestGate, "crowded", 1)
    assert not batcher._ready()
    assert 50 < batcher._clock(batcher._jobs[ticket]) < 60, "it is the one that looks at the clock"
    batcher._since -= 60.0
    assert batcher._ready(), "not for long"


def test_a_token_that_nobody_comes_for_any_more_delays_no_piece(open_slots, monkeypatch):
    """An interrupt can leave one behind."""
    monkeypatch.setattr(batcher_module, "GRACE_SECONDS", 60.0)
    slots = open_slots().slots
    batcher, ticket, gone = slots.batcher, Ticket(), Ticket()
    ticket.step = Step()
    batcher._since = batcher_module.time.monotonic()
    batcher._untold.add(Job(gone, slots.all[0].evaluation.runner.live, 1))
    assert batcher._goes(ticket, 64)


def test_a_step_of_nothing_says_nothing_of_how_long_one_takes(open_slots):
    batcher = open_slots().slots.batcher
    have_taken(batcher._one_step, 0.5)
    batcher._stepped(0, 1e-6)
    assert batcher._one_step.seconds == 0.5


def test_small_pieces_follow_each_other_until_they_take_as_long_as_a_large_one(open_slots, monkeypatch):
    batcher = open_slots().slots.batcher
    have_taken(batcher._one_step, 0.05)
    monkeypatch.setattr(batcher._meter, "costs", lambda: Costs(prefill_seconds=1e-3, batch_seconds=0.01))
    budget = pieces.PIECE_STEPS * 0.05
    ticket = Ticket()
    assert batcher._may_follow(ticket, 10_000), "the first one always may"
    batcher._piece_seconds = budget / 2
    assert batcher._may_follow(ticket, int(1e3 * (budget / 2 - 0.01)))
    assert not batcher._may_follow(ticket, int(1e3 * (budget / 2 - 0.01)) + 2)


def test_a_batch_that_fails_is_tried_by_each_alone(open_slots, monkeypatch):
    llm = open_slots()
    alone = [ask(llm, WORDS[:40]), ask(llm, WORDS[100:150])]
    step, failed = SharedContext.decode_step, []

    def fail_once(self, rows):
        if len(rows) > 1 and not failed:
            failed.append(rows)
            raise DecodeError(1, "no slot")
        return step(self, rows)

    monkeypatch.setattr(SharedContext, "decode_step", fail_once)
    patient = partial(monkeypatch.setattr, batcher_module, "GRACE_SECONDS", 60.0)
    said, begun = {}, threading.Barrier(2, patient)

    def run(i, prompt):
        stream = llm.generate(prompt, temp=0.0)
        first = next(stream)
        begun.wait(60)
        said[i] = [first, *islice(stream, 5)]

    threads = [threading.Thread(target=run, args=(i, p)) for i, p in enumerate((WORDS[:40], WORDS[100:150]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed
    assert [said[0], said[1]] == alone


def test_whose_tokens_a_step_decodes_are_woken_while_its_maker_goes_on(open_slots, monkeypatch):
    slots = open_slots(n_parallel=3).slots
    monkeypatch.setattr(Job, "stands", True)
    monkeypatch.setattr(SharedContext, "decode_step", lambda self, rows: [None] * len(rows))
    goes_on, wake = threading.Event(), batcher_module.ring
    monkeypatch.setattr(batcher_module, "ring", lambda bell: (goes_on.wait(20), wake(bell)))
    jobs = []
    for slot in slots.all:
        ticket = Ticket()
        jobs.append(Job(ticket, slot.evaluation.runner.live, 1))
        slots.batcher._jobs[ticket] = jobs[-1]
    slots.batcher._lead()
    assert all(job.done for job in jobs)
    assert all(job.bell.locked() for job in jobs), "nobody was woken yet"
    goes_on.set()
    assert all(job.bell.acquire(timeout=20) for job in jobs)


def test_a_step_has_its_tokens_in_the_order_of_their_sequences(open_slots, monkeypatch):
    """Whoever came first: recurrent states change places with every other order."""
    slots = open_slots(n_parallel=3).slots
    monkeypatch.setattr(Job, "stands", True)
    steps = []

    def noted(self, rows):
        steps.append([live.native.seq for live, _ in rows])
        return [None] * len(rows)

    monkeypatch.setattr(SharedContext, "decode_step", noted)
    for slot in (slots.all[2], slots.all[0], slots.all[1]):
        ticket = Ticket()
        slots.batcher._jobs[ticket] = Job(ticket, slot.evaluation.runner.live, 1)
    slots.batcher._lead()
    assert steps == [[0, 1, 2]]


def test_the_requests_that_a_prompt_keeps_waiting_are_counted(open_slots, monkeypatch):
    seen, costs = [], runner_module.costs_beside
    monkeypatch.setattr(runner_module, "costs_beside", lambda *a: (seen.append(costs(*a)), seen[-1])[1])
    llm = open_slots(n_parallel=3)
    ask(llm, WORDS[:50], 1)
    assert {c.waiting for c in seen} == {0}
    streams = [llm.generate(WORDS[100 * i : 100 * i + 50], temp=0.0) for i in range(2)]
    for stream in streams:
        list(islice(stream, 3))
    for left in (2, 1, 0):
        seen.clear()
        ask(llm, WORDS[200 + 20 * left : 300], 1)
        assert {c.waiting for c in seen} == {left}
        if left:
            streams.pop().close()
    assert llm.slots.batcher.waiting() == 0, "asked where no request runs, as when one is ended by another"
    monkeypatch.setattr(RequestGate, "crowded", 3)
    assert llm.slots.batcher.waiting() == 3, "those that are about to come in"


def test_a_prompt_is_not_cut_again_as_if_nobody_waited(open_slots, monkeypatch):
    llm = open_slots(n_batch=64, n_parallel=3)
    dear = Costs(token_seconds=1.0, prefill_seconds=1e-3, snapshot_seconds=1.0, batch_tokens=64)
    monkeypatch.setattr(CostMeter, "costs", lambda _: dear)
    streams = [llm.generate(WORDS[100 * i : 100 * i + 50], temp=0.0) for i in range(2)]
    for stream in streams:
        list(islice(stream, 3))
    ask(llm, WORDS[:390], 1)
    beside = llm.requests.last
    for stream in streams:
        stream.close()
    llm.prompt_cache.clear()
    llm.reset()
    ask(llm, WORDS[10:400], 1)
    alone = llm.requests.last
    assert beside.schedule.cuts == beside.plan.cuts
    assert len(beside.plan.cuts) < len(alone.plan.cuts)


def test_what_a_piece_takes_is_remembered(open_slots):
    llm = open_slots()
    ask(llm, WORDS[:60], 1)
    assert llm.slots.batcher._prompt_token.seconds > 0


def test_a_piece_of_few_tokens_does_not_say_what_one_takes(open_slots):
    """Most of its time is a batch's: the next piece would be small for it, and the next."""
    llm = open_slots()
    ask(llm, WORDS[: pieces.TIMED_PIECE - 1], 1)
    assert llm.slots.batcher._prompt_token.seconds == 0


def test_a_process_that_was_stopped_for_a_while_goes_on_as_before(open_slots):
    """What was under way meanwhile says nothing of how long a step waits for others, nor of pieces."""
    batcher = open_slots().slots.batcher
    have_taken(batcher._one_step, 0.02)
    have_taken(batcher._prompt_token, 0.01)
    grace, token = batcher._grace(), batcher._token_seconds()
    batcher._stepped(1, 3600.0)
    batcher._prompt_token.took(60.0)
    assert (batcher._grace(), batcher._token_seconds()) == (grace, token)


def test_a_piece_that_was_cut_short_does_not_say_what_a_token_takes(open_slots, monkeypatch):
    llm = open_slots()
    ask(llm, WORDS[:60], 1)
    before = llm.slots.batcher._prompt_token.seconds

    def cut_short(*_, **__):
        raise RequestCancelled("in the middle")

    monkeypatch.setattr(LiveSequence, "decode", cut_short)
    with pytest.raises(RequestCancelled):
        ask(llm, WORDS[200:300], 1)
    assert llm.slots.batcher._prompt_token.seconds == before


def test_the_memory_is_tried_in_the_thread_that_decodes_later(open_slots, monkeypatch):
    where, probe = [], assembly.probe
    monkeypatch.setattr(
        assembly, "probe", lambda *a: (where.append(threading.current_thread()), probe(*a))[1]
    )
    llm = open_slots()
    llm.slots.batcher._shared.compute(lambda: where.append(threading.current_thread()))
    assert where[0] is where[1]
    assert where[0] is not threading.main_thread()


def test_a_step_begins_when_what_nobody_waits_for_is_through(open_slots, monkeypatch):
    settle, settled = ComputeThread.settle, []
    monkeypatch.setattr(ComputeThread, "settle", lambda self: (settled.append(1), settle(self)))
    llm = open_slots()
    settled.clear()
    llm.reset()
    assert settled


def test_what_another_caller_decoded_makes_all_slots_unknown(open_slots):
    llm = open_slots()
    lives = [slot.evaluation.runner.live for slot in llm.slots.all]
    for live in lives:
        live.decode(np.array(WORDS[:20], np.int32), "last")
    lives[0].native.decode([5], 20, "none")
    llm.slots.all[0].evaluation.runner.check()
    assert [live.n for live in lives] == [0] * len(lives)


def test_who_was_away_for_long_once_is_waited_for_again_after_two_tokens(open_slots, monkeypatch):
    """As it is with many answers that begin together, after their prompts were decoded in turn."""
    batcher = open_slots().slots.batcher
    ticket, now = Ticket(), [1000.0]
    monkeypatch.setattr(batcher_module.time, "monotonic", lambda: now[0])
    batcher._answering[ticket] = 0.0
    waited_for = []
    for away in (500.0, 0.0, 0.0):
        ticket.idle_since = now[0] - away
        batcher.returned(ticket)
        waited_for.append(batcher._expects_more())
    assert waited_for == [False, True, True]
    for _ in range(3):  # and who is slow each time is not
        ticket.idle_since = now[0] - 500.0
        batcher.returned(ticket)
    assert not batcher._expects_more()


def test_one_of_those_that_wait_for_a_step_watches_the_clock(open_slots, monkeypatch):
    """The others sleep until it is made: who wakes takes time from those that decode."""
    llm = open_slots(n_parallel=3)
    batcher, clocks = llm.slots.batcher, []
    wait = batcher._wait

    def seen(ticket, bell, seconds):
        if ticket in batcher._jobs and next(iter(batcher._jobs)) is not ticket:
            clocks.append(seconds)
        wait(ticket, bell, seconds)

    monkeypatch.setattr(batcher, "_wait", seen)
    streams = [llm.generate(WORDS[50 * i : 50 * i + 50], temp=0.0) for i in range(3)]
    for stream in streams:
        next(stream)
    monkeypatch.setattr(batcher_module, "GRACE_SECONDS", 60.0)
    threads = [threading.Thread(target=lambda s=s: list(islice(s, 12))) for s in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert batcher.rows > batcher.cells.steps, "they were decoded together"
    assert set(clocks) <= {None}


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the batcher reads."""
    now = [1000.0]
    monkeypatch.setattr(batcher_module.time, "monotonic", lambda: now[0])
    return now


def test_who_waits_for_the_lock_while_an_end_is_stored_is_not_late(open_slots, clock):
    """Else a step is made without those that could not come, and they have the next one to themselves."""
    slots = open_slots(n_parallel=3).slots
    batcher, live = slots.batcher, slots.all[0].evaluation.runner.live
    here, kept, ending = Ticket(), Ticket(), Ticket()
    batcher._answering |= {here: 0.0, kept: 0.0, ending: 0.0}
    batcher._jobs[here] = Job(here, live, 1)
    batcher._since = clock[0]
    assert not batcher._ready()
    clock[0] += 1.0
    assert batcher._ready(), "nobody came for long"
    ending.over = True
    batcher.stepped(ending)
    assert not batcher._ready()
    clock[0] += 1.0
    assert batcher._ready()


def test_what_has_no_answer_makes_no_step_wait(open_slots, clock):
    """A program may ask for this and that as often as it likes."""
    slots = open_slots(n_parallel=3).slots
    batcher, live = slots.batcher, slots.all[0].evaluation.runner.live
    here, kept = Ticket(), Ticket()
    batcher._answering |= {here: 0.0, kept: 0.0}
    batcher._jobs[here] = Job(here, live, 1)
    batcher._since = clock[0]
    clock[0] += 1.0
    batcher.stepped(Ticket())
    assert batcher._ready()


def test_a_step_waits_since_the_last_one_came(open_slots, clock, monkeypatch):
    llm = open_slots(n_parallel=3)
    batcher, live = llm.slots.batcher, llm.slots.all[0].evaluation.runner.live
    first, second = Ticket(), Ticket()
    batcher._answering |= {first: 0.0, Ticket(): 0.0}
    batcher._jobs[first] = Job(first, live, 1)
    batcher._since = clock[0]
    monkeypatch.setattr(llm._gate.seats, "current", second)
    monkeypatch.setattr(batcher.solo, "takes", lambda *_: False)
    second.cancelled = True
    clock[0] += 1.0
    with pytest.raises(RequestCancelled):
        batcher.append(live, 1)
    assert not batcher._ready()


def test_a_token_that_lost_its_cells_is_not_taken_for_one_whose_memory_was_changed(open_slots):
    """It stays until its owner wakes, who is to wait for room."""
    slots = open_slots(n_parallel=2).slots
    batcher, live, ticket = slots.batcher, slots.all[0].evaluation.runner.live, Ticket()
    batcher._jobs[ticket] = job = Job(ticket, live, 1)
    job.end(NoRoom("none"))
    assert not job.stands
    batcher._lead()
    assert isinstance(job.error, NoRoom)


def test_whose_patience_ends_right_then_looks_again_at_once(open_slots, clock, monkeypatch):
    """Not after what a thread sleeps that has no clock to watch."""
    slots = open_slots(n_parallel=3).slots
    batcher, live, slept = slots.batcher, slots.all[0].evaluation.runner.live, []
    monkeypatch.setattr(batcher._gate, "step_aside", lambda ticket, wait: slept.append(wait.keywords))
    first, second, prompt = Ticket(), Ticket(), Ticket()
    batcher._jobs |= {ticket: Job(ticket, live, 1) for ticket in (first, second)}
    batcher._since = clock[0] - 1.0
    for ticket in (first, second):
        batcher._wait(ticket, batcher._jobs[ticket].bell, batcher._clock(batcher._jobs[ticket]))
    prompt.step = Step()
    batcher._pieces.enter(prompt, 64)
    batcher._wait(first, batcher._jobs[first].bell, batcher._clock(batcher._jobs[first]))
    assert [each["timeout"] for each in slept] == [0.0, POLL, POLL], "who makes way for a piece is rung for"


def test_a_step_waits_for_nobody_who_waits_for_room(open_slots, monkeypatch):
    """To decode again what was lost: its next token comes long after."""
    llm = open_slots(n_parallel=3)
    batcher, runner, ticket = llm.slots.batcher, llm.runner, Ticket()
    monkeypatch.setattr(llm.requests.gate.seats, "current", ticket)
    ticket.step, expected = Step(), []
    batcher._answering[ticket] = 0.0
    assert batcher._expects_more()
    monkeypatch.setattr(batcher.cells, "wait", lambda *_: expected.append(batcher._expects_more()))
    runner.wait_for_room(100)
    assert expected == [False]
