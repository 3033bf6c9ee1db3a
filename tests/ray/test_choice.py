"""The order of replicas: session, then longest resumable prefix, then shortest queue."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.ray.choice import Candidate, in_order
from llamahybrid.ray.conversations import Hints, Link

CHAIN = (Link(1, 100, False), Link(2, 200, True), Link(3, 300, True))
HINTS = Hints(CHAIN)
SLOTS = 2


def test_longest_resumable_prefix_comes_first() -> None:
    replicas = [
        Candidate("none"),
        Candidate("some", known={1, 2}),
        Candidate("most", queue=SLOTS, known={1, 2, 3}),
    ]
    assert in_order(replicas, HINTS, SLOTS) == ["most", "some", "none"]


def test_idle_replica_precedes_a_queue() -> None:
    replicas = [Candidate("most", queue=SLOTS + 1, known={1, 2, 3}), Candidate("idle")]
    assert in_order(replicas, HINTS, SLOTS)[0] == "idle"
    busy = [Candidate("most", queue=SLOTS + 1, known={1, 2, 3}), Candidate("busy", queue=1)]
    assert in_order(busy, HINTS, SLOTS)[0] == "most", "to wait costs less than to decode it all again"
    far = [Candidate("most", queue=3 * SLOTS, known={1, 2, 3}), Candidate("busy", queue=1)]
    assert in_order(far, HINTS, SLOTS)[0] == "busy"


def test_new_conversation_goes_to_the_shortest_queue() -> None:
    replicas = [
        Candidate("knows", queue=1, known={1}, conversations=1),
        Candidate("busy", conversations=3),
        Candidate("idle", conversations=2),
    ]
    assert in_order(replicas, HINTS, SLOTS) == ["idle", "busy", "knows"]


def test_session_comes_first_unless_it_would_queue() -> None:
    replicas = [Candidate("its"), Candidate("most", known={1, 2, 3})]
    assert in_order(replicas, HINTS, SLOTS, session="its")[0] == "its"
    crowded = [Candidate("its", queue=SLOTS + 1), Candidate("idle")]
    assert in_order(crowded, HINTS, SLOTS, session="its")[0] == "idle"
    assert in_order(replicas, HINTS, SLOTS, session="gone")[0] == "most"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)), max_size=6))
def test_order_has_all_replicas_and_idle_ones_first(drawn: list[tuple[int, int, int]]) -> None:
    replicas = [
        Candidate(i, queue, range(1, deep + 1), count) for i, (queue, deep, count) in enumerate(drawn)
    ]
    order = in_order(replicas, HINTS, SLOTS, random.choice([None, 0]))
    assert sorted(order) == list(range(len(replicas)))
    if order and any(each.queue == 0 for each in replicas):
        assert replicas[order[0]].queue <= SLOTS
