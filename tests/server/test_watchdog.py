"""The timeout of many waits, by the clock of a loop that the tests advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from llamahybrid.server.watchdog import Watchdog


class Clock:
    """The time and the timers of an event loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None], Mock]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Mock:
        handle = Mock()
        self._timers.append((self.now + seconds, call, handle))
        return handle

    def advance(self, to: float) -> None:
        """Run the timers that are due until then."""
        while due := [each for each in self._timers if each[0] <= to]:
            first = min(due, key=lambda each: each[0])
            self._timers.remove(first)
            self.now = first[0]
            if not first[2].cancel.called:
                first[1]()
        self.now = to


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


@pytest.fixture
def ran_out(clock: Clock) -> list[float]:
    """The times at which a wait took too long."""
    return []


@pytest.fixture
def watchdog(clock: Clock, ran_out: list[float]) -> Watchdog:
    return Watchdog(10, lambda: ran_out.append(clock.now))


def test_short_waits_and_pauses_never_run_out(clock: Clock, watchdog: Watchdog, ran_out: list[float]) -> None:
    for start in range(0, 200, 20):
        clock.advance(start)
        watchdog.begin()
        clock.advance(start + 9)
        watchdog.end()
    assert not ran_out


def test_a_wait_runs_out_in_time_and_again_while_it_goes_on(
    clock: Clock, watchdog: Watchdog, ran_out: list[float]
) -> None:
    clock.advance(13)
    watchdog.begin()
    clock.advance(34)
    assert ran_out == [23, 33]


def test_a_new_wait_begins_the_time_again(clock: Clock, watchdog: Watchdog, ran_out: list[float]) -> None:
    watchdog.begin()
    clock.advance(9)
    watchdog.begin()
    clock.advance(20)
    assert ran_out == [19]


def test_nothing_is_called_after_the_stop(clock: Clock, watchdog: Watchdog, ran_out: list[float]) -> None:
    watchdog.begin()
    clock.advance(5)
    watchdog.stop()
    clock.advance(50)
    assert not ran_out
