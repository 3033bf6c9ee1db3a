"""Publish over ZMQ which token blocks a model can resume from its slots, RAM and folder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from llamahybrid.client.salt import SHARED
from llamahybrid.events import resumable
from llamahybrid.events.blocks import Block, Cutter, events
from llamahybrid.prompt_cache.base import Tokens

try:
    import msgpack
    import zmq
    from zmq import ZMQError as ZMQError
except ImportError as error:  # pragma: no cover
    raise ImportError("KV events need pyzmq and msgpack: pip install 'llamahybrid[events]'") from error

if TYPE_CHECKING:
    from llamahybrid.llama import Llama

logger = logging.getLogger("llamahybrid")

RESET_MESSAGES = 5_000
"""Messages after which all blocks are cleared and published again; twice as many can be replayed."""
_END = b"\xff" * 8
"""Ends a replay, in place of a sequence number."""


class EventPublisher(AbstractContextManager["EventPublisher"]):
    """Publishes the resumable prefixes of a model as blocks until it is closed; salted requests are left out.

    A message has three frames: topic, sequence number (8 bytes, big endian) and, as MessagePack, [time,
    events, rank] (vLLM 0.11, `examples/online_serving/kv_events_subscriber.py`). The medium is "GPU" for a
    live slot, "CPU" for RAM, "DISK" for the folder. Late subscribers ask for a replay or wait for a reset.
    """

    def __init__(
        self,
        llm: Llama,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        block_size: int = 16,
        interval: float = 0.5,
    ) -> None:
        """Bind a PUB socket to `endpoint` (with port 0: any port) and start publishing.

        `replay`: address of a ROUTER socket that repeats messages from a sequence number on. `topic`: llm-d's
        router expects "kv@POD@MODEL". `block_size`: tokens. `interval`: seconds between two messages.

        Raises:
            ValueError: `block_size` is below 1.
            zmq.ZMQError: an address cannot be bound.
        """
        if block_size < 1:
            raise ValueError(f"a block has at least one token, not {block_size}")
        self._llm, self._interval, self._topic = llm, interval, topic.encode()
        self._cutter = Cutter(block_size)
        self._published: dict[str, dict[int, Block]] = {}
        self._sent: list[tuple[bytes, bytes]] = []
        self._sequence = 0
        self._context = zmq.Context()
        try:
            self._out = self._bound(zmq.PUB, endpoint)
            self._replay = self._bound(zmq.ROUTER, replay) if replay is not None else None
        except BaseException:
            self._context.destroy(0)
            raise
        self.endpoint: str = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay else None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamahybrid events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last changes and end; may be called twice."""
        self._closing.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self, kind: int, address: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 4 * RESET_MESSAGES)  # beyond it a ROUTER drops messages of a replay
        made.bind(address)
        return made

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._publish()
                if self._replay is None:
                    self._closing.wait(self._interval)
                elif self._replay.poll(int(1000 * self._interval)):
                    self._answer()
            self._publish()
        finally:
            self._context.destroy(linger=100)

    def _publish(self) -> None:
        """Send the changes since the last message, if any."""
        try:
            now = self._resumable()
        except Exception:  # the model is being closed, say
            logger.debug("resumable prefixes are unknown", exc_info=True)
            return
        message: list[dict[str, Any]] = []
        if self._sequence % RESET_MESSAGES == 0:  # the first, too: subscribers may remember another process
            message, self._published = [{"type": "AllBlocksCleared"}], {}
            self._sent = self._sent[-RESET_MESSAGES:]  # a replay starts with a reset
        for medium, found in now.items():
            message += events(self._published.get(medium, {}), found, medium)
        self._published = now
        if message:
            self._sent.append((self._sequence.to_bytes(8, "big"), msgpack.packb([time.time(), message, 0])))
            self._out.send_multipart((self._topic, *self._sent[-1]))
            self._sequence += 1

    def _answer(self) -> None:
        """Repeat messages to one subscriber."""
        assert self._replay is not None
        try:
            client, *_, first = self._replay.recv_multipart()
            for number, payload in (*self._sent, (_END, b"")):
                if number >= first:
                    self._replay.send_multipart((client, b"", number, payload))
        except (ValueError, zmq.ZMQError) as error:
            logger.warning("a subscriber's request is invalid: %s", error)

    def _resumable(self) -> dict[str, dict[int, Block]]:
        """All blocks by medium."""
        slots, cache = self._llm.slots, self._llm.prompt_cache
        if not slots.runners:
            return {}
        first = slots.runners[0].live
        namespace = first.identity.namespace_of(SHARED)
        view = first.blank_view(namespace)
        paths: dict[str, Iterator[Tokens]] = {
            "GPU": (tokens for name, tokens in (s.glimpse() for s in slots.all) if name == namespace)
        }
        if cache is not None:
            paths |= {"CPU": resumable.in_ram(cache, view), "DISK": resumable.on_disk(cache, view)}
        return self._cutter.blocks_of(paths, namespace)
