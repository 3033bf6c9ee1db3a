"""Who is in, who fits in, and who makes room."""

import time

import pytest

from llamahybrid.request.seats import Seats
from llamahybrid.request.step_frames import Step
from llamahybrid.request.ticket import Ticket, this_thread


@pytest.fixture
def seats() -> Seats:
    made = Seats()
    made.slots, made.patience = 2, 60.0  # whatever this machine does between two lines
    return made


def seated(seats: Seats, idle: float = 0.0, **what: object) -> Ticket:
    """A ticket that is in and was last advanced so many seconds ago."""
    ticket = Ticket()
    for name, value in what.items():
        setattr(ticket, name, value)
    ticket.idle_since = time.monotonic() - idle
    seats.take(ticket)
    return ticket


def test_as_many_fit_in_as_there_are_slots(seats: Seats) -> None:
    one = seated(seats)
    assert seats.free
    assert seats.fits(Ticket())
    two = seated(seats)
    assert not seats.free
    assert not seats.fits(Ticket())
    assert list(seats) == [one, two]
    seats.leave(one)
    assert one not in seats
    assert seats.fits(Ticket())


def test_one_that_needs_the_whole_context_sits_alone(seats: Seats) -> None:
    whole = Ticket()
    whole.whole = True
    assert seats.has_room(whole)
    one = seated(seats)
    assert not seats.has_room(whole)
    seats.leave(one)
    seats.take(whole)
    assert seats.free
    assert not seats.has_room(Ticket()), "not beside it"
    whole.over = True
    assert seats.has_room(Ticket())


def test_who_was_idle_longest_makes_room_and_before_all_who_is_over(seats: Seats) -> None:
    young, old = seated(seats, idle=100), seated(seats, idle=200)
    assert seats.victim(Ticket()) is old
    assert seats.idle() is old
    young.over, young.idle_since = True, time.monotonic()
    assert seats.victim(Ticket()) is young
    assert seats.idle() is young, "nobody could tidy up after it"
    seats.leave(young)
    assert seats.victim(Ticket()) is None, "it fits in"
    assert seats.idle() is old


def test_nobody_makes_room_inside_a_step_or_before_its_patience_is_over(seats: Seats) -> None:
    seated(seats, idle=100, step=Step())
    fresh = seated(seats)
    assert seats.victim(Ticket()) is None
    assert seats.idle() is None
    assert not seats.has_room(Ticket())
    fresh.thread = this_thread()  # which now asks for something else
    assert seats.victim(Ticket()) is fresh


def test_a_cancel_that_came_while_others_were_current_reaches_native_code(seats: Seats) -> None:
    one, two = seated(seats), seated(seats)
    seats.switch(one)
    assert seats.current is one
    number = one.number
    seats.switch(one)
    assert one.number == number, "the same step goes on"
    two.cancelled = True
    seats.switch(two)
    assert seats.stop.requested
    seats.switch(one)
    assert not seats.stop.requested
    seats.leave(two)
    assert seats.current is one
    seats.leave(one)
    assert seats.current is None
