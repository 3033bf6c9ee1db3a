"""One request at a time, and what becomes of those that are given up."""

import threading
from contextlib import ExitStack

import pytest

from llamahybrid.errors import Busy, RequestCancelled, RequestSuperseded
from llamahybrid.live.stop import RequestGate


def in_thread(function):
    """Run in another thread; (what it returned, what it raised)."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert outcome, "the thread did not end"
    return outcome[0]


def test_another_thread_is_refused_when_it_must_not_wait():
    gate = RequestGate(wait=False)
    gate.open()
    assert isinstance(in_thread(gate.open)[1], Busy)


def test_another_thread_gives_up_after_its_patience():
    gate = RequestGate(wait=0.01)
    gate.open()
    assert isinstance(in_thread(gate.open)[1], Busy)


def test_another_thread_waits_for_the_end():
    gate = RequestGate()
    first = gate.open()
    entered = threading.Event()

    def second():
        request = gate.open()
        entered.set()
        gate.close(request)

    thread = threading.Thread(target=second)
    thread.start()
    assert not entered.wait(0.05)
    gate.close(first)
    thread.join(10)
    assert entered.is_set()


def test_the_same_thread_replaces_what_it_gave_up():
    gate = RequestGate()
    old = gate.open()
    new = gate.open()
    with pytest.raises(RequestSuperseded), gate.step(old):
        pass
    with gate.step(new):
        assert gate.running_here


def test_closing_a_replaced_request_does_not_end_the_new_one():
    gate = RequestGate(wait=False)
    old = gate.open()
    new = gate.open()
    gate.close(old)
    with gate.step(new):
        pass
    assert isinstance(in_thread(gate.open)[1], Busy)


def test_a_request_cannot_start_inside_anothers_step():
    gate = RequestGate(wait=False)
    request = gate.open()
    with gate.step(request), pytest.raises(Busy):
        gate.open()


def test_a_generator_moved_to_another_thread_belongs_to_that_one():
    gate = RequestGate(wait=False)
    request = gate.open()

    def step():
        with gate.step(request):
            return gate.running_here

    assert in_thread(step) == (True, None)
    with pytest.raises(Busy):
        gate.open()


def test_an_operation_inside_a_step_is_part_of_it():
    gate = RequestGate(wait=False)
    request = gate.open()
    with gate.step(request), gate.hold():
        pass
    with gate.step(request):
        pass


def test_an_operation_that_changes_state_replaces_a_suspended_request():
    gate = RequestGate()
    request = gate.open()
    with gate.hold():
        assert gate.running_here
    assert request.superseded


def test_an_operation_that_only_looks_leaves_a_suspended_request_alone():
    gate = RequestGate()
    request = gate.open()
    with gate.hold(keep_suspended=True):
        pass
    with gate.step(request):
        pass


def test_an_operation_that_only_looks_waits_for_another_threads_request():
    gate = RequestGate(wait=False)
    gate.open()

    def look():
        with gate.hold(keep_suspended=True):
            pass

    assert isinstance(in_thread(look)[1], Busy)


def test_a_failing_operation_lets_the_next_thread_in():
    gate = RequestGate(wait=False)
    with pytest.raises(ZeroDivisionError), gate.hold():
        raise ZeroDivisionError
    assert in_thread(gate.open)[1] is None


def test_a_cancel_ends_with_its_request():
    gate = RequestGate()
    request = gate.open()
    gate.cancel()
    with pytest.raises(RequestCancelled):
        gate.check()
    gate.close(request)
    gate.check()
    with pytest.raises(RequestSuperseded), gate.step(request):
        pass


def test_a_failing_step_leaves_the_gate_usable():
    gate = RequestGate(wait=False)
    request = gate.open()
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ZeroDivisionError))
        with gate.step(request):
            raise ZeroDivisionError
    gate.close(request)
    assert in_thread(gate.open)[1] is None
