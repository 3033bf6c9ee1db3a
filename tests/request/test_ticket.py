"""What stands for a thread, and what a completion is told of its request."""

import threading
from types import SimpleNamespace

import pytest

from llamahybrid.request.ticket import Ticket, this_thread


def test_each_thread_has_a_mark_of_its_own_that_no_later_one_gets():
    marks, idents = [], []

    def note():
        marks.append((this_thread(), this_thread()))
        idents.append(threading.get_ident())

    while len(idents) < 20 or len(set(idents)) == len(idents):  # until one is given out again
        thread = threading.Thread(target=note)
        thread.start()
        thread.join(20)
    note()
    assert all(first is second for first, second in marks)
    assert len({first for first, _ in marks}) == len(marks) == len(idents)


@pytest.fixture
def ticket():
    """One whose request found four of its tokens."""
    made = Ticket(completing=True)
    made.request = SimpleNamespace(plan=SimpleNamespace(cached=4), cancelled=False)
    return made


def test_a_completion_is_told_what_was_cached_where_it_counts_tokens(ticket):
    completion = {"usage": {"prompt_tokens": 9}, "choices": [{"finish_reason": "stop"}]}
    ticket.tell(completion)
    assert completion["usage"] == {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    assert completion["choices"] == [{"finish_reason": "stop"}]
    chunk = {"choices": [{"finish_reason": None}]}
    ticket.tell(chunk)
    assert chunk == {"choices": [{"finish_reason": None}]}


def ends(ticket):
    chunks = [{"choices": [{"finish_reason": reason}]} for reason in (None, "length")]
    for chunk in chunks:
        ticket.tell(chunk)
    return [chunk["choices"][0]["finish_reason"] for chunk in chunks]


def test_a_cancelled_completion_says_so_where_it_ends(ticket):
    ticket.request.cancelled = True
    assert ends(ticket) == [None, "cancelled"]


def test_one_that_was_over_before_the_cancel_came_does_not(ticket):
    ticket.cancelled = True
    assert ends(ticket) == [None, "length"]


def test_one_that_was_cancelled_before_its_prompt_was_begun_with_says_so():
    ticket = Ticket(completing=True)
    assert ends(ticket) == [None, "length"]
    ticket.cancelled = True
    assert ends(ticket) == [None, "cancelled"]
    completion = {"usage": {"prompt_tokens": 9}, "choices": []}
    ticket.tell(completion)
    assert completion["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_when_it_asked_is_when_it_first_did():
    first, second = Ticket(), Ticket()
    assert first.asked == first.began == 0
    first.asks()
    second.asks()
    first.asks()
    assert 0 < first.asked < second.asked
    second.answers()
    assert second.asked == 0 < first.asked < second.began, "its next prompt would be a new one"
