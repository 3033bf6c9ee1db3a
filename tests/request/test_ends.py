"""Each request that is over is told of, once."""

import logging

import pytest

from llamahybrid.request.ends import Ends
from llamahybrid.request.seats import Seats
from llamahybrid.request.ticket import Ticket


class Told:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Ticket]] = []

    def end(self, ticket: Ticket) -> None:
        self.all.append(("end", ticket))

    def switch(self, ticket: Ticket) -> None:
        self.all.append(("switch", ticket))

    park = resume = begin = stepped = switch


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def seats() -> Seats:
    return Seats()


@pytest.fixture
def ends(told: Told, seats: Seats) -> Ends:
    return Ends(told, seats)


def test_an_end_is_told_of_once(ends: Ends, told: Told) -> None:
    ticket = Ticket()
    ends.tell(ticket)
    ends.tell(ticket)
    ends.tell_quietly(ticket)
    assert told.all == [("end", ticket)]


def test_what_is_given_up_is_told_of_when_somebody_comes(ends: Ends, told: Told, seats: Seats) -> None:
    one, two = Ticket(), Ticket()
    seats.take(one)
    for ticket in (one, two):
        ends.leave_word(ticket)
    assert len(ends._abandoned) == 2
    assert not told.all
    ends.tell_of_abandoned()
    assert told.all == [("end", one), ("end", two)]
    assert len(ends._abandoned) == 0
    assert one not in seats


def test_one_of_several_slots_is_ended_in_its_own(ends: Ends, told: Told, seats: Seats) -> None:
    seats.slots = 2
    one, two = Ticket(), Ticket()
    seats.take(one)
    ends.end_seated(one)
    ends.end_seated(two)  # it had lost its place
    assert told.all == [("switch", one), ("end", one), ("end", two)]


def test_what_the_end_of_another_raises_is_logged(
    ends: Ends, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(told, "end", lambda ticket: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ends.tell(Ticket())
    with caplog.at_level(logging.ERROR, "llamahybrid"):
        ends.tell_quietly(Ticket())
    assert "given up" in caplog.text
