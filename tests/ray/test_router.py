"""The request router as Ray calls it; `make integrations ONLY=ray` has Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is in the environment of `make integrations ONLY=ray`")

from llamahybrid.ray.conversations import hints_of
from llamahybrid.ray.router import ResumableRouter

BODY = b'{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}'


def router(**queues: int) -> ResumableRouter:
    made = ResumableRouter.__new__(ResumableRouter)
    made._replica_queue_len_cache = SimpleNamespace(get=queues.get)
    made.initialize_state(slots=2)
    return made


def replica(name: str, *known: int) -> Any:
    return SimpleNamespace(replica_id=name, routing_stats={"resumable": list(known)})


def pending(body: bytes = BODY, **headers: str) -> Any:
    return SimpleNamespace(args=[SimpleNamespace(hints=hints_of(headers, body))])


def chosen(made: ResumableRouter, replicas: list[Any], asked: Any) -> list[str]:
    ranks = asyncio.run(made.choose_replicas(replicas, asked))
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id for rank in ranks]


def test_replica_that_can_resume_the_chat_comes_first() -> None:
    chain = hints_of({}, BODY).chain
    replicas = [replica("a"), replica("b", chain[1].name), replica("c")]
    assert chosen(router(), replicas, pending())[0] == "b"
    assert chosen(router(b=3), replicas, pending())[0] != "b", "it would have to queue"


def test_replica_of_the_previous_request_comes_first() -> None:
    made, replicas = router(), [replica(name) for name in "abcd"]
    made.on_request_routed(pending(), "c", None)
    assert chosen(made, replicas, pending())[0] == "c"


def test_session_stays_at_its_replica() -> None:
    made, replicas = router(), [replica(name) for name in "abcd"]
    header = {"x-session-id": "mine"}
    made.on_request_routed(pending(b"{}", **header), "d", None)
    assert chosen(made, replicas, pending(b"{}", **header))[0] == "d"


def test_new_conversations_are_distributed() -> None:
    made, replicas = router(), [replica(name) for name in "ab"]
    sent = []
    for i in range(6):
        asked = pending(BODY.replace(b'"b"', f'"{i}"'.encode()))
        sent.append(chosen(made, replicas, asked)[0])
        made.on_request_routed(asked, sent[-1], None)
    assert sorted(sent) == ["a"] * 3 + ["b"] * 3
