"""Who waits, in order, and who is no longer there."""

import time

from llamahybrid.request import line as line_module
from llamahybrid.request.line import Line
from llamahybrid.request.ticket import Ticket


def test_first_come_first():
    line, one, two = Line(), Ticket(), Ticket()
    line.renew(one)
    line.renew(two)
    line.renew(one)
    assert line.is_first(one)
    assert not line.is_first(two)
    assert not line.is_first(Ticket()), "it has not come yet"
    line.leave(one)
    assert line.is_first(two)
    assert len(line) == 1


def test_a_place_that_nobody_renews_is_void(monkeypatch):
    monkeypatch.setattr(line_module, "PLACE_EXPIRES", 0.01)
    line, one, two = Line(), Ticket(), Ticket()
    line.renew(one)
    time.sleep(0.02)
    line.renew(two)
    assert line.is_first(two)


def test_a_request_that_is_over_is_in_nobodys_way():
    line, one, two = Line(), Ticket(), Ticket()
    line.renew(one)
    line.renew(two)
    one.over = True
    assert line.is_first(two)


def test_a_bell_rings_for_all_and_only_while_they_wait():
    line = Line()
    with line.bell() as wait, line.bell() as other:
        line.ring()
        line.ring()
        assert wait(20)
        assert other(20)
        assert not wait(0.01)
    line.ring()
