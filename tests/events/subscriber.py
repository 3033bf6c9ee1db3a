"""A subscriber of KV events, written from vLLM's and Dynamo's descriptions: it imports nothing of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgpack
import zmq


class Subscriber:
    """Holds what a router would know: by medium, the blocks that are stored."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._again = None
        if replay is not None:
            self._again = self._context.socket(zmq.DEALER)
            self._again.connect(replay)
        self._expected = 0
        self.blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.topics: set[str] = set()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, seconds: float) -> bool:
        """Take one message in, after those that were missed; False if none comes."""
        if not self._socket.poll(int(1000 * seconds)):
            return False
        topic, number, payload = self._socket.recv_multipart()
        self.topics.add(topic.decode())
        sequence = int.from_bytes(number, "big")
        if sequence > self._expected and self._again is not None:
            self.ask_again(self._expected, up_to=sequence)
        if sequence >= self._expected:
            self._process(payload)
            self._expected = sequence + 1
        return True

    def ask_again(self, first: int, up_to: int | None = None) -> None:
        assert self._again is not None
        self._again.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert self._again.poll(30_000), "no answer"
            _, number, payload = self._again.recv_multipart()
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence < 0:
                return
            if (up_to is None or sequence < up_to) and sequence >= self._expected:
                self._process(payload)
                self._expected = sequence + 1

    def until(self, reached: Callable[[], Any], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"never told: {self.paths()}"
            if not self.receive(0.1) and self._again is not None:
                self.ask_again(self._expected)  # the first ones are sent while a subscription is on its way

    def _process(self, payload: bytes) -> None:
        at, events, _rank = msgpack.unpackb(payload)
        assert abs(time.time() - at) < 3600
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks.clear()
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
