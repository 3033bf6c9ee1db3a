"""KV events over ZMQ: the token blocks that a model can resume from its slots, RAM and folder.

A message has three frames: topic, sequence number (8 bytes, big endian) and, as MessagePack, [time, events,
rank]. Source: vLLM 0.11 (`vllm/distributed/kv_events.py`), in the map form that Dynamo's router reads
(`docs/integrations/kv-events-custom-engines.md`): the key "type" names the event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeAlias

import xxhash

from llamahybrid.client.salt import SHARED
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import LiveView, PromptCache
from llamahybrid.prompt_cache.nodes import ID_BYTES, ids_of, tokens_of

try:
    import msgpack
    import zmq
    from zmq import ZMQError as ZMQError
except ImportError as error:  # pragma: no cover
    raise ImportError("KV events need pyzmq and msgpack: pip install 'llamahybrid[events]'") from error

logger = logging.getLogger("llamahybrid")

MOST_PATHS = 4096
"""Of RAM, and of the folder's newest places the eighth part; others are not published."""

LOOK_SECONDS = 2.0
"""Longest time in which the folder is read for a message."""

REST = 9
"""The pause after a message takes at least so many times as long as the message: a large cache is published
less often. Waits for locks and folders count, too: seconds at most, `LONGEST_REST`."""
LONGEST_REST = 5.0


Blocks: TypeAlias = dict[int, tuple[int | None, bytes]]
"""By a hash below 2**63 of a block and all before it: the hash of the block before, and the tokens' ids."""


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
        between two messages. Raises ValueError for a size below 1, zmq.ZMQError for an address that cannot be
        bound.
        """
        if block_size < 1:
            raise ValueError(f"a block has at least one token, not {block_size}")
        self._llm, self._interval, self._topic, self._size = llm, interval, topic.encode(), block_size
        self._cut: dict[tuple[int, bytes], Blocks] = {}  # by seed and path, those of the last look
        self._ram: tuple[int, str, Sequence[bytes]] = -1, "", ()  # changes, namespace, paths of the last look
        self._published: dict[str, Blocks] | None = None  # None: a subscriber knows nothing yet
        self._sequence = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscription is told, also to a known topic
        try:
            self._socket.bind(endpoint)
        except BaseException:
            self._context.destroy(0)
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
        try:
            while not self._closing.is_set():
                begun = time.monotonic()
                self._publish()
                self._rest(min(LONGEST_REST, max(self._interval, REST * (time.monotonic() - begun))))
            self._publish()
        finally:
            self._context.destroy(linger=100)

    def _rest(self, seconds: float) -> None:
        """Wait, at most until somebody subscribes or the end."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._closing.is_set():
            if self._socket.poll(int(1000 * min(left, self._interval)) + 1):
                if self._socket.recv().startswith(b"\x01"):
                    self._published = None
                return

    def _publish(self) -> None:
        """Send the changes since the last message, if any."""
        try:
            now = self._resumable()
        except Exception:  # the model is being closed, say
            logger.debug("resumable prefixes are unknown", exc_info=True)
            return
        message = [{"type": "AllBlocksCleared"}] if self._published is None else []
        for medium, blocks in now.items():
            message += changes((self._published or {}).get(medium, {}), blocks, medium)
        self._published = now
        if message:
            packed = msgpack.packb([time.time(), message, 0])
            self._socket.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), packed))
            self._sequence += 1

    def _resumable(self) -> dict[str, Blocks]:
        """All blocks by medium. Raises IndexError without a context."""
        live, cache = self._llm.slots.runners[0].live, self._llm.prompt_cache
        view = live.blank_view(live.identity.namespace_of(SHARED))
        glimpses = (slot.glimpse() for slot in self._llm.slots.all)
        live_paths = (ids_of(tokens) for namespace, tokens in glimpses if namespace == view.namespace)
        paths: dict[str, Iterable[bytes]] = {"GPU": live_paths}
        if cache is not None:
            changes = cache.guard.changes
            if self._ram[:2] != (changes, view.namespace):
                self._ram = changes, view.namespace, list(in_ram(cache, view))
            paths |= {"CPU": self._ram[2], "DISK": on_disk(cache, view)}
        seed, before, self._cut = xxhash.xxh3_64_intdigest(view.namespace.encode()), self._cut, {}
        found: dict[str, Blocks] = {medium: {} for medium in paths}
        for medium, some in paths.items():
            for ids in some:
                blocks = self._cut[seed, ids] = before.get((seed, ids)) or cut(ids, self._size, seed)
                found[medium] |= blocks
        return found


def in_ram(cache: PromptCache, view: LiveView) -> Iterator[bytes]:
    """Yield the deepest restorable prefix of each path in RAM. `view`: an empty context's."""
    for leaf in cache.look(lambda store: list(islice(store.tree.leaves(view.namespace), MOST_PATHS))):
        yield cache.restorable(leaf, view)  # the lock is free between two


def on_disk(cache: PromptCache, view: LiveView) -> Iterator[bytes]:
    """Yield the paths of the records that the folder got last and from which a prompt can go on."""
    placed, _ = cache.disk.glance(MOST_PATHS // 8, LOOK_SECONDS) if cache.disk else ((), b"")
    for namespace, ids, items in placed:
        if namespace == view.namespace and any(i.is_checkpoint or view.attention_is_all for i in items):
            yield ids


def cut(ids: bytes, size: int, seed: int) -> Blocks:
    """All complete blocks of `size` tokens of a path, each after its parent. `seed`: names the model."""
    step, parent, found = ID_BYTES * size, None, Blocks()
    for start in range(0, len(ids) - step + 1, step):
        block = parent, ids[start : start + step]
        parent = xxhash.xxh3_64_intdigest(block[1], seed=seed if parent is None else parent) >> 1
        found[parent] = block
    return found


def changes(old: Blocks, new: Blocks, medium: str) -> Iterator[dict[str, Any]]:
    """The events from `old` to `new`; consecutive blocks of a path are one event."""
    if removed := [name for name in old if name not in new]:
        yield {"type": "BlockRemoved", "block_hashes": removed, "medium": medium}
    chains = list[list[int]]()
    for name in (name for name in new if name not in old):
        if not chains or new[name][0] != chains[-1][-1]:
            chains.append([])
        chains[-1].append(name)
    for chain in chains:
        ids = [new[name][1] for name in chain]
        stored = {"type": "BlockStored", "block_hashes": chain, "parent_block_hash": new[chain[0]][0]}
        stored |= {"token_ids": tokens_of(b"".join(ids)).tolist(), "block_size": len(ids[0]) // ID_BYTES}
        yield stored | {"lora_id": None, "medium": medium, "lora_name": None}
