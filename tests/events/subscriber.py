"""A subscriber of KV events, written from vLLM's and Dynamo's descriptions: it imports nothing of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgpack
import zmq


class Subscriber:
    """Holds what a router would know: by medium, the blocks that are stored."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._expected: int | None = None
        self._told = False
        self.blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.topics: set[str] = set()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, seconds: float) -> bool:
        """Take one message in; False if none comes."""
        if not self._socket.poll(int(1000 * seconds)):
            return False
        topic, number, payload = self._socket.recv_multipart()
        self.topics.add(topic.decode())
        sequence = int.from_bytes(number, "big")
        assert self._expected in (None, sequence), "a message was lost"
        self._expected = sequence + 1
        self._process(payload)
        return True

    def until(self, reached: Callable[[], Any], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"never told: {self.paths()}"
            self.receive(0.1)

    def _process(self, payload: bytes) -> None:
        at, events, _rank = msgpack.unpackb(payload)
        assert abs(time.time() - at) < 3600
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks, self._told = {}, True
                case _ if not self._told:
                    pass  # sent while the subscription was on its way
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        del self.blocks[event["medium"]][name]
                case "BlockStored":
                    self._store(event)
                case other:
                    raise AssertionError(other)

    def _store(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        known = self.blocks.setdefault(event["medium"], {})
        assert parent is None or parent in known, "a block comes after its parent"
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for i, name in enumerate(event["block_hashes"]):
            known[name] = (parent, tuple(event["token_ids"][size * i : size * (i + 1)]))
            parent = name

    def path(self, medium: str, name: int) -> list[int]:
        """The tokens up to a block's end."""
        parent, tokens = self.blocks[medium][name]
        return [*(self.path(medium, parent) if parent is not None else ()), *tokens]

    def paths(self) -> dict[str, list[list[int]]]:
        """By medium, the tokens that it can resume: those of blocks that no other goes on from."""
        return {
            medium: [self.path(medium, n) for n in known if n not in {p for p, _ in known.values()}]
            for medium, known in self.blocks.items()
        }
