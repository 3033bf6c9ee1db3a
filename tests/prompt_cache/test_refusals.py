"""What a disk refuses: how long it is left alone, and which records of it."""

from __future__ import annotations

import errno

import pytest

from llamahybrid.prompt_cache import refusals


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now[0])
    return now


def test_a_disk_that_refused_is_left_alone_for_a_while(clock: list[float]) -> None:
    rest = refusals.Backoff()
    waits = []
    for _ in range(9):
        rest.failed()
        began = clock[0]
        while not rest.over():
            assert rest.left() > 0
            clock[0] += 0.5
        assert rest.left() == 0
        waits.append(clock[0] - began)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    rest.worked()
    rest.failed()
    clock[0] += 1
    assert rest.over()


@pytest.mark.parametrize(
    ("error", "one"),
    [
        (PermissionError(errno.EACCES, "denied"), True),
        (OSError(errno.EIO, "a bad sector"), True),
        (NotADirectoryError("x is no folder"), True),
        (OSError(errno.EMFILE, "too many open files"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (OSError("who knows"), False),
        (MemoryError(), False),
    ],
)
def test_what_is_said_of_one_file_is_not_said_of_the_disk(error: BaseException, one: bool) -> None:
    assert refusals.of_one(error) is one


def test_what_cannot_be_read_is_tried_again_later(clock: list[float]) -> None:
    refused = refusals.RefusedRecords()
    assert refused.unreadable("abc")
    assert not refused.unreadable("abc")
    assert "abc" in refused
    assert refused.any_unreadable()
    assert refused.due() == []
    clock[0] += refusals.UNREADABLE_SECONDS
    assert refused.due() == ["abc"]
    assert "abc" not in refused
    assert not refused.any_unreadable()


def test_what_others_removed_or_wrote_anew_is_refused_no_more() -> None:
    refused = refusals.RefusedRecords()
    refused.stuck |= {"a1": 10, "a2": 20, "b1": 5}
    refused.unreadable("a")
    refused.unreadable("a3")
    refused.misplaced.add("b2")
    refused.seen("a", {"a2"})
    assert [key for key in ("a", "a1", "a2", "a3", "b1", "b2") if key in refused] == ["a2", "b1", "b2"]
    assert refused.nbytes == 25
    for key in ("a2", "b2"):
        refused.replaced(key)
        assert key not in refused
