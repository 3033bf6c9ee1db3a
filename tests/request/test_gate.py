"""Whose turn it is: tickets, requests that make room, those that are given up, and interrupts anywhere."""

import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from llamahybrid.errors import Busy, ModelClosed, RequestCancelled
from llamahybrid.request import ends, line, seats, step_lock
from llamahybrid.request import gate as gate_module
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.step_frames import Step, executes
from llamahybrid.request.ticket import Ticket

TRACED = {module.__file__ for module in (gate_module, seats, step_lock, line, ends)}
"""Where an interrupt may come."""


class Tenant:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def begin(self, ticket):
        self.told.append(("begin", ticket))

    def park(self, ticket):
        self.told.append(("park", ticket))
        ticket.parked = "its state"

    def resume(self, ticket):
        self.told.append(("resume", ticket))

    def end(self, ticket):
        self.told.append(("end", ticket))

    def switch(self, ticket):
        self.told.append(("switch", ticket))

    def joined(self, ticket):
        """Told of without the lock in hand: in no order with the others."""

    def stepped(self, ticket):
        self.told.append(("stepped", ticket))

    def of(self, ticket):
        return [what for what, whose in self.told if whose is ticket]


@pytest.fixture
def tenant():
    return Tenant()


@pytest.fixture
def gate(tenant, monkeypatch):
    """One that is patient, and believes in places in the line, however long this machine stands still."""
    monkeypatch.setattr(line, "PLACE_EXPIRES", 600.0)
    made = RequestGate(True, tenant)
    made.seats.patience = 600.0
    return made


def in_thread(function, *args):
    """Run in another thread; (what it returned, what it raised)."""
    outcome = []

    def run():
        try:
            outcome.append((function(*args), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert outcome, "the thread did not end"
    return outcome[0]


def begun(gate, where=None):
    """A ticket that has made a step, in this thread or by `where`."""
    ticket = Ticket()
    (where or (lambda f, *args: f(*args)))(gate.run, ticket, int)
    return ticket


def gets_in(gate):
    """Another thread makes a request, from its beginning to its end."""
    return in_thread(gate.alone, lambda: "in") == ("in", None)


# -- whose turn it is ------------------------------------------------------------------------------


def test_another_thread_is_refused_when_it_must_not_wait(gate):
    begun(gate)
    gate.wait = False
    assert isinstance(in_thread(gate.run, Ticket(), int)[1], Busy)


def test_another_thread_gives_up_when_its_time_is_over(gate):
    begun(gate)
    gate.wait = 0.01
    assert isinstance(in_thread(gate.run, Ticket(), int)[1], Busy)


def test_another_thread_waits_for_the_end(gate):
    first, entered = begun(gate), threading.Event()
    thread = threading.Thread(target=lambda: gate.alone(entered.set), daemon=True)
    thread.start()
    assert not entered.wait(0.3)
    gate.run(first, gate.finish, first)
    assert entered.wait(20)
    thread.join(20)


def test_a_refusal_is_for_those_that_have_not_begun(gate, tenant):
    gate.wait, gate.seats.patience = False, 0.2
    old = begun(gate)
    new = begun(gate)  # of the same thread
    assert gate.current is new
    assert in_thread(gate.run, old, lambda: gate.current is old) == (True, None)
    assert tenant.of(old) == ["begin", "park", "resume"]


def test_the_same_thread_takes_its_own_place_at_once(gate, tenant):
    old = begun(gate)
    new = begun(gate)
    gate.run(old, int)
    gate.run(new, int)
    assert tenant.of(old) == ["begin", "park", "resume", "park"]
    assert tenant.of(new) == ["begin", "park", "resume"]


def test_one_that_nobody_advances_makes_room(gate, tenant):
    gate.seats.patience = 0.1
    old = begun(gate)
    assert gets_in(gate)
    assert tenant.of(old) == ["begin", "park"]


def test_the_thread_that_made_the_last_step_may_be_dead(gate):
    gate.seats.patience = 0.1
    begun(gate, in_thread)
    assert gets_in(gate)


def test_a_thread_is_never_taken_for_a_dead_one_of_the_same_ident(gate):
    ticket = begun(gate, in_thread)
    for _ in range(20):  # idents are given out again
        gate.wait = False
        assert isinstance(in_thread(gate.run, Ticket(), int)[1], Busy)
    assert gate.current is ticket


def test_who_came_first_goes_first(gate):
    running, order = begun(gate), []
    threads = []
    for name in "abc":
        threads.append(threading.Thread(target=gate.alone, args=(order.append, name), daemon=True))
        threads[-1].start()
        while len(gate._line) < len(threads):
            time.sleep(0.01)
    gate.run(running, gate.finish, running)
    gate.alone(order.append, "late")
    for thread in threads:
        thread.join(20)
    assert order == ["a", "b", "c", "late"]


def test_a_place_in_the_line_that_nobody_renews_is_void(gate, monkeypatch):
    monkeypatch.setattr(line, "PLACE_EXPIRES", 0.2)
    gate._line.renew(Ticket())  # its thread was interrupted between two lines
    assert gets_in(gate)


@pytest.mark.parametrize("ends", ["comes in", "is given up"])
def test_one_that_comes_after_another_waits_for_it_and_never_stands_before_it(gate, ends):
    gate.wait, gate.seats.slots = False, 2
    first, second, stepped = Ticket(), Ticket(), threading.Event()
    second.after = first
    thread = threading.Thread(target=gate.run, args=(second, stepped.set), daemon=True)
    thread.start()
    assert not stepped.wait(0.3), "the one that it comes after is not in"
    if ends == "comes in":
        assert in_thread(gate.run, first, int) == (0, None)
    else:
        gate.abandon(first)
    assert stepped.wait(20)
    thread.join(20)


def test_one_that_comes_after_another_is_never_refused(gate):
    gate.wait, gate.seats.patience = False, 0.2
    first = begun(gate, in_thread)
    second = Ticket()
    second.after = first
    assert in_thread(gate.run, second, lambda: "in") == ("in", None)


def test_one_that_nobody_wants_any_more_leaves_the_line(gate):
    begun(gate)
    ticket, raised = Ticket(), []

    def wait():
        try:
            gate.run(ticket, int)
        except RequestCancelled as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not gate._line:
        time.sleep(0.01)
    gate.cancel(ticket)
    thread.join(0.3)
    assert thread.is_alive(), "one that is only cancelled still says so to its caller when its turn comes"
    ticket.unwanted = True
    thread.join(20)
    assert raised
    assert not gate._line


def test_one_that_nobody_wants_any_more_does_not_wait_for_another_one_s_step(gate):
    """With a free slot it stands in no line, but waits for the lock: a step may be a whole prompt."""
    gate.seats.slots = 2
    inside, over = threading.Event(), threading.Event()

    def long():
        inside.set()
        over.wait(20)

    holding = threading.Thread(target=gate.run, args=(Ticket(), long), daemon=True)
    holding.start()
    inside.wait(20)
    ticket, raised = Ticket(), []

    def wait():
        try:
            gate.run(ticket, int)
        except RequestCancelled as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not gate.crowded:
        time.sleep(0.01)
    ticket.unwanted = True
    thread.join(20)
    still_held = not over.is_set()
    over.set()
    holding.join(20)
    assert raised
    assert still_held
    assert not gate.crowded


def test_who_waits_for_a_place_is_not_about_to_make_a_step(gate):
    """All came at once and saw one; the others wait for it, which is none of those that are in have to."""
    gate.seats.slots = 2
    over, first, others = threading.Event(), Ticket(), [Ticket() for _ in range(4)]

    def long():
        while len(gate._lock._wanting) < len(others):
            time.sleep(0.01)
        while not over.is_set():
            gate.step_aside(first, partial(over.wait, 0.01))
        gate.finish(first)

    def stays(ticket):
        while not over.is_set():
            gate.step_aside(ticket, partial(over.wait, 0.01))
        gate.finish(ticket)

    threads = [threading.Thread(target=gate.run, args=(first, long), daemon=True)]
    threads += [threading.Thread(target=gate.run, args=(t, stays, t), daemon=True) for t in others]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while (len(gate._line) < 3 or gate.crowded) and time.monotonic() < deadline:
        time.sleep(0.01)
    crowded, asked = gate.crowded, [t.asked for t in others]
    over.set()
    for thread in threads:
        thread.join(20)
    assert crowded == 0
    assert sum(number > 0 for number in asked) == 1, "for the others there was none after all"


@pytest.mark.parametrize("told", ["begin", "resume", "switch"])
def test_who_is_in_is_not_at_the_door(tenant, gate, told):
    """Coming back may take as long as a prompt does, and nobody else is there."""
    gate.seats.slots, crowded = 2, []
    setattr(tenant, told, lambda ticket: crowded.append(gate.crowded))
    ticket = Ticket()
    ticket.parked = "its state"
    gate.run(ticket, int)
    assert crowded == [0]


def test_steps_never_overlap(gate):
    gate.seats.patience = 0.0
    inside, most = [], []

    def work():
        inside.append(1)
        time.sleep(0.001)
        most.append(len(inside))
        inside.pop()

    def ask():
        ticket = Ticket()
        for _ in range(10):
            gate.run(ticket, work)
        gate.run(ticket, gate.finish, ticket)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(ask) for _ in range(4)]:
            future.result(60)
    assert max(most) == 1


def test_an_operation_inside_a_step_is_part_of_it(gate, tenant):
    ticket = Ticket()
    assert gate.run(ticket, gate.alone, lambda: gate.current is ticket)
    assert tenant.of(ticket) == ["begin"]


def test_a_request_cannot_be_advanced_inside_anothers_step(gate):
    gate.seats.patience = 0.1
    old = begun(gate)
    with pytest.raises(RuntimeError, match="inside"):
        gate.run(Ticket(), gate.run, old, int)
    assert gets_in(gate)


# -- ends ------------------------------------------------------------------------------------------


def test_a_failing_step_leaves_the_gate_usable(gate):
    ticket = Ticket()
    with pytest.raises(ZeroDivisionError):
        gate.run(ticket, lambda: 1 / 0)
    gate.abandon(ticket)
    assert gets_in(gate)


def test_a_failing_operation_lets_the_next_thread_in(gate):
    with pytest.raises(ZeroDivisionError):
        gate.alone(lambda: 1 / 0)
    assert gets_in(gate)


def test_each_request_is_ended_once(gate, tenant):
    finished, given_up, parked = Ticket(), begun(gate), begun(gate)
    gate.run(finished, gate.finish, finished)
    for ticket in (finished, given_up, parked, given_up):
        gate.abandon(ticket)
    gate.alone(int)
    assert [tenant.of(t).count("end") for t in (finished, given_up, parked)] == [1, 1, 1]


def test_one_that_never_began_is_not_ended(gate, tenant):
    gate.abandon(Ticket())
    gate.alone(int)
    assert [what for what, _ in tenant.told] == ["begin", "end"]


def test_what_is_given_up_while_the_collector_runs_is_ended_by_the_next(gate, tenant):
    ticket = begun(gate)

    class Cycle:
        def __del__(self):
            gate.abandon(ticket)
            assert "end" not in tenant.of(ticket), "work was done under the collector"

    cycle = Cycle()
    cycle.itself = cycle
    del cycle
    gc.collect()
    assert ticket.over
    assert tenant.of(ticket) == ["begin"]
    gate.alone(int)
    assert tenant.of(ticket) == ["begin", "end"]


def test_the_callback_of_one_that_was_given_up_does_not_fail_another(gate, tenant, monkeypatch):
    ticket = begun(gate)
    monkeypatch.setattr(tenant, "end", lambda t: 1 / 0 if t is ticket else None)
    gate._stepping, ticket.step = ticket, Step()  # somebody is in
    gate.abandon(ticket)
    gate._stepping = ticket.step = None
    assert gate.alone(lambda: "in") == "in"
    assert gets_in(gate)


# -- cancelling and closing ------------------------------------------------------------------------


def test_a_cancel_ends_with_its_request(gate):
    ticket = begun(gate)
    gate.cancel()
    with pytest.raises(RequestCancelled):
        gate.run(ticket, gate.check)
    gate.run(ticket, gate.finish, ticket)
    gate.alone(gate.check)


def test_a_cancel_of_one_that_lost_its_place_waits_for_it(gate):
    old, new = begun(gate), begun(gate)
    gate.cancel(old)
    gate.run(new, gate.check)
    assert not gate.seats.stop.requested
    with pytest.raises(RequestCancelled):
        gate.run(old, gate.check)
    assert gate.seats.stop.requested, "native code that runs for it would not be stopped"


def test_a_cancel_of_one_that_is_over_ends_nobody_else(gate):
    old = begun(gate)
    gate.abandon(old)
    new = begun(gate)
    gate.cancel(old)
    gate.run(new, gate.check)


def test_closing_waits_for_the_step_and_ends_what_is_left(gate, tenant):
    inside, go_on, closed = threading.Event(), threading.Event(), []
    ticket = Ticket()

    def work():
        inside.set()
        go_on.wait(20)
        gate.check()

    def run():
        with pytest.raises(RequestCancelled):
            gate.run(ticket, work)

    runner = threading.Thread(target=run)
    runner.start()
    inside.wait(20)
    closer = threading.Thread(target=gate.close, args=(lambda: closed.append(1),))
    closer.start()
    while not ticket.cancelled:
        time.sleep(0.01)
    assert not closed
    go_on.set()
    closer.join(20)
    runner.join(20)
    assert closed == [1]
    assert tenant.of(ticket) == ["begin", "end"]
    gate.close(lambda: closed.append(2))
    with pytest.raises(ModelClosed):
        gate.run(ticket, int)
    with pytest.raises(ModelClosed):
        gate.alone(int)
    assert closed == [1]


def test_nobody_waits_for_a_closed_gate(gate):
    ticket, raised = begun(gate), []

    def wait():
        with pytest.raises(ModelClosed):
            gate.run(Ticket(), int)
        raised.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not gate._line:
        time.sleep(0.01)
    gate.close(int)
    waiter.join(20)
    assert raised
    gate.abandon(ticket)


def test_one_that_is_being_seated_when_it_closes_is_cancelled(gate):
    take, entering, go_on = gate.seats.take, threading.Event(), threading.Event()

    def slow(ticket):
        entering.set()
        go_on.wait(20)
        take(ticket)

    def until_cancelled():
        for _ in range(2000):
            gate.check()
            time.sleep(0.01)

    gate.seats.take = slow
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(gate.run, Ticket(), until_cancelled)
        assert entering.wait(20)
        closing = pool.submit(gate.close, int)
        while not gate.closed:
            time.sleep(0.001)
        go_on.set()
        with pytest.raises(RequestCancelled):
            late.result(60)
        closing.result(60)


def test_it_cannot_be_closed_from_inside_a_step(gate):
    with pytest.raises(RuntimeError, match="inside"):
        gate.alone(gate.close, int)
    assert gets_in(gate)


# -- several at once -------------------------------------------------------------------------------


def test_as_many_are_in_as_there_are_slots(gate, tenant):
    gate.seats.slots = 2
    one, two = begun(gate), begun(gate, in_thread)
    assert gate.seated == [one, two]
    assert gate.run(one, lambda: gate.current is one)
    assert tenant.of(one)[:2] == ["switch", "begin"]
    gate.wait = False
    with pytest.raises(Busy):
        in_thread_raising(gate.run, Ticket(), int)
    gate.run(one, gate.finish, one)
    assert gate.seated == [two]
    assert in_thread(gate.run, Ticket(), lambda: "in") == ("in", None)


def in_thread_raising(function, *args):
    _, error = in_thread(function, *args)
    if error is not None:
        raise error


@pytest.mark.parametrize("take_its_place", [True, False])
def test_who_was_given_up_is_ended_where_it_is_seated(gate, tenant, take_its_place):
    gate.seats.slots = 2
    one, two = begun(gate), begun(gate)
    one.over = True  # and no word was left: an interrupt came between
    tenant.told.clear()
    if take_its_place:
        begun(gate)
    else:
        gate.seats.patience = 0
        assert gate.run(two, gate.make_way, two)
    told = [what for what in tenant.told if what[0] in ("switch", "end")]
    assert told.index(("end", one)) == told.index(("switch", one)) + 1
    assert one not in gate.seated


def test_one_that_needs_the_whole_context_waits_for_all(gate):
    gate.seats.slots, gate.wait = 3, False
    one, two = begun(gate), begun(gate)
    whole = Ticket()
    whole.whole = True
    assert isinstance(in_thread(gate.run, whole, int)[1], Busy)
    for ticket in (one, two):
        gate.run(ticket, gate.finish, ticket)
    assert in_thread(gate.run, whole, lambda: "alone") == ("alone", None)
    assert isinstance(in_thread(gate.run, Ticket(), int)[1], Busy)
    gate.finish(whole)
    assert in_thread(gate.run, Ticket(), lambda: "in") == ("in", None)


def test_others_step_while_one_steps_aside(gate):
    gate.seats.slots = 2
    one, two = begun(gate), begun(gate, in_thread)
    seen = []

    def aside():
        gate.step_aside(one, lambda: seen.append(in_thread(gate.run, two, lambda: gate.current is two)))
        seen.append(gate.current is one)

    gate.run(one, aside)
    assert seen == [(True, None), True]


def test_who_is_interrupted_ends_what_native_code_does_for_it_alone(gate):
    one = begun(gate)

    def step():
        gate.stop_native()
        before = gate.seats.stop.requested
        gate.seats.stop.arm(True)
        gate.stop_native()
        gate.seats.stop.arm(False)
        return before, gate.seats.stop.requested

    assert gate.run(one, step) == (False, True), "a batch of several is never armed"


def test_however_the_wait_ends_the_step_has_its_place_back(gate):
    gate.seats.slots = 2
    one = begun(gate)

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            gate.step_aside(one, raise_interrupt)
        return gate.inside, gate.current is one

    def raise_interrupt():
        raise KeyboardInterrupt

    assert gate.run(one, interrupted) == (True, True)


def test_a_look_at_a_step_says_nothing_of_the_next_one(gate, monkeypatch):
    """Who looks is slow: that step is over when it says what it saw, and its request is in the next one."""
    gate.seats.slots = 2
    ticket = begun(gate)
    ends, ended, inside, over = (threading.Event() for _ in range(4))

    def first():
        inside.set()
        ends.wait(20)

    def second():
        inside.set()
        over.wait(20)
        return ticket.inside == threading.get_ident()

    def both():
        gate.run(ticket, first)
        inside.clear()
        ended.set()
        return gate.run(ticket, second)

    def look(frame):
        ends.set()
        assert ended.wait(20)
        answer = executes(frame)
        assert inside.wait(20)
        return answer

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(both)
        assert inside.wait(20)
        monkeypatch.setattr(gate_module, "executes", look)
        gate._heal()
        monkeypatch.undo()
        over.set()
        assert made.result(20), "it is in the middle of it, and nobody may have its place"


def test_one_that_was_to_make_room_and_comes_back_at_that_moment_goes_on(gate, monkeypatch):
    """Who wanted its place waits for it, and not it for that one."""
    gate.seats.patience = 0.0
    old, victim = begun(gate), gate.seats.victim
    threads, asked = [], []

    def of(ticket):
        if gate.inside and ticket is not old:
            asked.append(ticket)
        if len(asked) == 2 and not threads:  # first whether there is one, then which
            threads.append(threading.Thread(target=gate.run, args=(old, gate.finish, old), daemon=True))
            threads[0].start()
            while not old.inside:
                time.sleep(0.001)
        return victim(ticket)

    gate.seats.victim = of
    assert gets_in(gate)
    threads[0].join(20)
    assert old.over


def test_a_free_seat_is_had_while_the_first_in_the_line_is_resumed(gate, tenant, monkeypatch):
    """That decodes its prompt again and steps aside; bells alone wake who waits here."""
    monkeypatch.setattr(line, "POLL", 600.0)
    gate.seats.slots = 2
    resuming, go_on = threading.Event(), threading.Event()

    def resume(ticket):
        resuming.set()
        gate.step_aside(ticket, lambda: go_on.wait(60))

    tenant.resume = resume
    parked, *seated = begun(gate), begun(gate, in_thread)
    parked.parked = "its state"
    gate.seats.leave(parked)
    seated.append(begun(gate, in_thread))
    waiting = []
    for ticket in (parked, Ticket()):
        waiting.append(threading.Thread(target=gate.run, args=(ticket, gate.finish, ticket), daemon=True))
        waiting[-1].start()
        while len(gate._line) < len(waiting):
            time.sleep(0.001)
    for ticket in seated:
        in_thread(gate.run, ticket, gate.finish, ticket)
    assert resuming.wait(20)
    waiting[1].join(20)
    assert not waiting[1].is_alive()
    go_on.set()
    waiting[0].join(20)
    assert not waiting[0].is_alive()


# -- interrupts ------------------------------------------------------------------------------------


def test_a_lock_that_an_interrupted_thread_left_is_replaced(gate):
    gate.seats.patience = 0.1
    done, left = threading.Event(), threading.Event()

    def leave_it():
        gate._lock.acquire()
        left.set()
        done.wait(20)

    thread = threading.Thread(target=leave_it)
    thread.start()
    left.wait(20)
    assert gets_in(gate)
    done.set()
    thread.join(20)


def test_a_lock_that_this_thread_left_is_not_taken_for_a_step(gate):
    gate.seats.patience = 0.1
    gate._lock.acquire()
    assert not gate.nested()
    gate._lock.acquire()
    assert begun(gate)
    assert gets_in(gate)


def test_a_request_that_comes_back_is_in_for_those_that_do_not_wait(gate, tenant, monkeypatch):
    old, new = begun(gate), begun(gate)
    gate.run(new, gate.finish, new)
    resuming, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(tenant, "resume", lambda ticket: (resuming.set(), go_on.wait(60)))
    thread = threading.Thread(target=gate.run, args=(old, int))
    thread.start()
    assert resuming.wait(20)
    gate.wait = False
    outcome = in_thread(gate.run, Ticket(), int)
    go_on.set()
    thread.join(20)
    assert isinstance(outcome[1], Busy)


def lines_of(function):
    """How many lines of the gate and its parts it runs."""
    count = []

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in TRACED:
            return None
        if event in ("line", "return"):
            count.append(1)
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return len(count)


def interrupted(function, number):
    """Run it with a KeyboardInterrupt at line `number` of them."""
    left = [number]

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in TRACED:
            return None
        if event in ("line", "return"):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)


def whole_request(gate):
    ticket = Ticket()
    try:
        gate.run(ticket, int)
        gate.run(ticket, int)
    finally:
        gate.abandon(ticket)


def overtaken_request(gate):
    old = begun(gate)
    try:
        gate.alone(int)
        gate.run(old, gate.finish, old)
    finally:
        gate.abandon(old)


def a_wait(gate):
    gate.wait = 0.02
    begun(gate, in_thread)
    with suppress(Busy):
        gate.alone(int)


@pytest.mark.parametrize("deed", [whole_request, overtaken_request, a_wait])
def test_an_interrupt_at_any_line_shuts_nobody_out(deed, monkeypatch):
    monkeypatch.setattr(seats, "PATIENCE", 0.02)
    monkeypatch.setattr(line, "PLACE_EXPIRES", 0.04)
    for module in (gate_module, step_lock, line):
        monkeypatch.setattr(module, "POLL", 0.02)

    def fresh():
        return RequestGate(True, Tenant())

    count = lines_of(lambda: deed(fresh()))
    shut_out = []
    for number in range(1, count + 1):
        gate = fresh()
        interrupted(lambda gate=gate: deed(gate), number)
        gate.wait = True
        if not gets_in(gate) or gate.nested() or gate.alone(lambda: "in") != "in":
            shut_out.append(number)
        gate = fresh()
        interrupted(lambda gate=gate: deed(gate), number)
        gate.wait = False
        # Longer than its patience, and than a place in the line is believed.
        if not any(gets_in(gate) or time.sleep(0.02) for _ in range(8)):
            shut_out.append(-number)
    assert count > 20
    assert not shut_out


def test_an_interrupt_at_any_line_of_a_step_aside_ends_it_in_its_own_place(monkeypatch):
    for module in (gate_module, step_lock, line):
        monkeypatch.setattr(module, "POLL", 0.02)

    class Strict(Tenant):
        def end(self, ticket):
            super().end(ticket)
            seen.append(gate.inside and gate.current in (ticket, None))

    def fresh():
        made = RequestGate(True, Strict())
        made.seats.slots = 2
        return made

    def another(other):
        gate.run(other, lambda: None)

    def aside(ticket, other):
        try:
            gate.step_aside(ticket, lambda: in_thread(another, other))
        finally:
            gate.finish(ticket)

    def deed():
        other = begun(gate, in_thread)
        ticket = Ticket()
        try:
            gate.run(ticket, aside, ticket, other)
        finally:
            gate.abandon(ticket)

    seen, gate = [], fresh()
    count = lines_of(deed)
    assert seen == [True]
    wrong, shut_out = [], []
    for number in range(1, count + 1):
        seen, gate = [], fresh()
        interrupted(deed, number)
        if not all(seen):
            wrong.append(number)
        if not gets_in(gate) or gate.nested():
            shut_out.append(number)
    assert count > 40
    assert (wrong, shut_out) == ([], [])
