"""KV events over ZMQ: the token blocks that a model can resume from its slots, RAM and folder.

A message has three frames: topic, sequence number (8 bytes, big endian) and, as MessagePack, [time, events,
rank]. Source: vLLM 0.11 (`vllm/distributed/kv_events.py`), in the map form that Dynamo's router reads
(`docs/integrations/kv-events-custom-engines.md`): the key "type" names the event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count, islice
from typing import Any, TypeAlias

import xxhash

from llamahybrid.client.salt import SHARED
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache.nodes import ID_BYTES, ids_of, tokens_of
from llamahybrid.prompt_cache.outline import LOOK_SECONDS, MOST_BRANCHES

try:
    import msgpack
    import zmq as zmq
except ImportError as error:  # pragma: no cover
    raise ImportError("KV events need pyzmq and msgpack: pip install 'llamahybrid[events]'") from error

MOST_PATHS = 4096
"""Of RAM, and `MOST_BRANCHES` of the folder, the newest; others are not published."""

REST = 9
"""The pause after a look, in times of its duration, at least: a large cache is published less often."""

Prefixes: TypeAlias = dict[tuple[str, bytes], list[int]]
"""By namespace and token ids of a prefix that can be resumed: the hashes of its blocks (`hashes`)."""


class EventPublisher(AbstractContextManager["EventPublisher"]):
    """Publishes the resumable prefixes of a model as blocks until it is closed; salted requests are left out.

    The medium is "GPU" for a live slot, "CPU" for RAM, "DISK" for the folder. Each new subscription has all
    blocks cleared and published again: a subscriber that missed a message subscribes anew.
    """

    def __init__(
        self, llm: Llama, endpoint: str, *, topic: str = "", block_size: int = 16, interval: float = 0.5
    ) -> None:
        """Bind a socket to `endpoint` (with port 0: any port) and start publishing.

        `topic`: llm-d's router expects "kv@POD@MODEL". `block_size`: tokens. `interval`: the least seconds
        between two messages. Raises ValueError for a size below 1, zmq.ZMQError for an unusable address.
        """
        if block_size < 1:
            raise ValueError(f"a block has at least one token, not {block_size}")
        self._llm, self._interval, self._topic, self._size = llm, interval, topic.encode(), block_size
        self._told: dict[str, Prefixes] = {}  # by medium; empty: subscribers know nothing yet
        self._ram: tuple[tuple[int, str], list[bytes]] = (-1, ""), []  # changes, namespace; prefixes then
        self._numbers = count()
        self._socket = zmq.Context().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # known topics, too
        try:
            self._socket.bind(endpoint)
        except BaseException:
            self._socket.context.destroy(0)
            raise
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamahybrid events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last changes and end; may be called twice."""
        self._closing.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        due, tick = 0.0, int(1000 * self._interval) + 1
        while not self._closing.is_set():
            if (begun := time.monotonic()) >= due:
                self._publish()
                due = time.monotonic() + max(self._interval, REST * (time.monotonic() - begun))
            if self._socket.poll(tick) and self._socket.recv().startswith(b"\x01"):  # a subscription
                self._told, due = {}, 0.0
        self._publish()
        self._socket.context.destroy(linger=100)

    def _publish(self) -> None:
        """Send the changes since the last message, if any."""
        now: dict[str, Prefixes] = {"GPU": {}, "CPU": {}, "DISK": {}}
        try:
            for medium, path in self._resumable():
                now[medium][path] = self._told.get(medium, {}).get(path) or hashes(*path, self._size)
        except Exception:  # the model is being closed, say
            logging.getLogger("llamahybrid").debug("resumable prefixes are unknown", exc_info=True)
            return
        events = [] if self._told else [{"type": "AllBlocksCleared"}]
        for medium, prefixes in now.items():
            events += changes(self._told.get(medium, {}), prefixes, medium, self._size)
        self._told = now
        if events:
            message = msgpack.packb([time.time(), events, 0])
            self._socket.send_multipart((self._topic, next(self._numbers).to_bytes(8, "big"), message))

    def _resumable(self) -> Iterator[tuple[str, tuple[str, bytes]]]:
        """Yield medium, namespace and token ids of each prefix. Raises IndexError without a context."""
        live, cache = self._llm.slots.runners[0].live, self._llm.prompt_cache
        view = live.blank_view(name := live.identity.namespace_of(SHARED))
        for namespace, tokens in (slot.glimpse() for slot in self._llm.slots.all):
            if namespace == name:
                yield "GPU", (name, ids_of(tokens))
        if cache is None:
            return
        if self._ram[0] != (now := (cache.guard.changes, name)):
            leaves = cache.look(lambda store: list(islice(store.tree.leaves(name), MOST_PATHS)))
            self._ram = now, [cache.restorable(leaf, view) for leaf in leaves]  # the lock is free between two
        yield from (("CPU", (name, ids)) for ids in self._ram[1])
        placed, _ = cache.disk.glance(MOST_BRANCHES, 4 * LOOK_SECONDS) if cache.disk else ((), b"")
        for namespace, ids, items in placed:
            if namespace == name and any(i.is_checkpoint or view.attention_is_all for i in items):
                yield "DISK", (name, ids)


def hashes(namespace: str, ids: bytes, size: int) -> list[int]:
    """Hashes below 2**63 of the complete blocks of `size` tokens, each with all before it."""
    last, step = xxhash.xxh3_64_intdigest(namespace.encode()), ID_BYTES * size
    ends = range(step, len(ids) + 1, step)
    return [last := xxhash.xxh3_64_intdigest(ids[end - step : end], seed=last) >> 1 for end in ends]


def changes(old: Prefixes, new: Prefixes, medium: str, size: int) -> Iterator[dict[str, Any]]:
    """The events from `old` to `new`; the new blocks of a prefix are one event."""
    if old == new:
        return
    known = set[int]().union(*old.values())
    if removed := known.difference(*new.values()):
        yield {"type": "BlockRemoved", "block_hashes": list(removed), "medium": medium}
    for (_, ids), names in new.items():
        n = sum(name in known for name in names)  # they come first
        if n < len(names):
            known.update(names)
            stored = {"type": "BlockStored", "block_hashes": names[n:], "block_size": size, "medium": medium}
            stored |= {"parent_block_hash": names[n - 1] if n else None, "lora_id": None, "lora_name": None}
            yield stored | {"token_ids": tokens_of(ids)[n * size : len(names) * size].tolist()}
