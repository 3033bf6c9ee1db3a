"""Each change does to a client what it says, and no more: commands by name, in one transaction."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from llamahybrid.prompt_cache.remote_changes import PREFIX, discard, publish, record, withdraw

KEY = f"{'a' * 32}-state-5-5"


class Client:
    """Notes commands; a transaction may be refused."""

    def __init__(self, refused: bool = False) -> None:
        self.done: list[tuple[Any, ...]] = []
        self._refused = refused

    def pipeline(self) -> Client:
        return self

    def execute(self) -> None:
        if self._refused:
            self._refused = False
            self.done.clear()
            raise redis.ResponseError("OOM")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.done.append((name, *args))


def test_what_is_published_is_listed_and_counted() -> None:
    client = Client()
    publish("part", KEY)(client)
    assert client.done == [
        ("rename", "part", record(KEY)),
        ("persist", record(KEY)),
        ("sadd", f"{PREFIX}:shard:a", KEY),
        ("hincrby", f"{PREFIX}:changes", "a", 1),
    ]


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_withdrawn_goes_even_from_a_server_that_begins_no_transaction(refused: bool) -> None:
    client = Client(refused)
    withdraw(KEY)(client)
    assert client.done == [
        ("delete", record(KEY)),
        ("srem", f"{PREFIX}:shard:a", KEY),
        ("hincrby", f"{PREFIX}:changes", "a", 1),
    ]


def test_what_cannot_be_published_is_not_listed() -> None:
    client = Client(refused=True)
    with pytest.raises(redis.ResponseError):
        publish("part", KEY)(client)
    assert ("srem", f"{PREFIX}:shard:a", KEY) in client.done


def test_a_part_is_discarded() -> None:
    client = Client()
    discard("part")(client)
    assert client.done == [("delete", "part")]
