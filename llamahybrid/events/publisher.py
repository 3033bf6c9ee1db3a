"""Publishes what can be resumed in one model's slots, RAM and folder, over ZMQ."""

from __future__ import annotations

import logging
import threading
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llamahybrid.client.salt import SHARED
from llamahybrid.events.blocks import Block, Blocks, change
from llamahybrid.prompt_cache import resumable

try:
    import zmq
    from zmq import ZMQError as ZMQError

    from llamahybrid.events import wire
except ImportError as error:  # pragma: no cover
    raise ImportError("KV events need pyzmq and msgpack: pip install 'llamahybrid[events]'") from error

if TYPE_CHECKING:
    from llamahybrid.llama import Llama

logger = logging.getLogger("llamahybrid")

INTERVAL = 0.5
"""Seconds between two looks."""

ANEW = 5_000
"""Messages after which all is told again; twice as many may be asked for."""


ANSWERED = 2 * ANEW + 2
"""Messages of the longest answer."""


class EventPublisher:
    """Tells subscribers which blocks of tokens a model need not decode again, until it is closed.

    `endpoint`: where to bind a PUB socket, "tcp://127.0.0.1:5557" or with port 0 for any (see `endpoint`
    afterwards). `replay`: where to bind a ROUTER socket that sends messages again from a sequence number on.
    `topic`: the first frame; llm-d's router wants "kv@POD@MODEL". `block_size`: tokens a block. Told of
    are only prefixes that can be resumed, up to the deepest restore point of each, and nothing of requests
    with a salt of their own. Events lag behind by `interval` seconds at most. Raises zmq.ZMQError where it
    cannot bind.

    Who subscribes late asks for what was sent before, or waits: every `ANEW` messages all is cleared and told
    again, and what can be asked for begins with such a message.
    """

    def __init__(
        self,
        llm: Llama,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        block_size: int = 16,
        interval: float = INTERVAL,
    ) -> None:
        self._llm = llm
        self._interval = interval
        self._topic = topic.encode()
        self._blocks: dict[wire.Medium, Blocks] = {}
        self._size = block_size
        self._told: dict[wire.Medium, dict[int, Block]] = {}
        self._namespace = ""
        self._sequence = 0
        self._anew = 0  # the message in which all was told last
        self._sent: deque[tuple[int, bytes]] = deque()
        Blocks(block_size, "")  # raises for a size that is none
        self._context = zmq.Context()
        try:
            self._out = self._context.socket(zmq.PUB)
            self._out.setsockopt(zmq.LINGER, 0)
            self._out.bind(endpoint)
            self.endpoint: str = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
            """Where subscribers connect."""
            self._again = None
            self.replay: str | None = None
            """Where they ask for what they have missed."""
            if replay is not None:
                self._again = self._context.socket(zmq.ROUTER)
                self._again.setsockopt(zmq.LINGER, 0)
                # Beyond that a ROUTER drops silently; 1,000 by default, and an answer may have more.
                self._again.setsockopt(zmq.SNDHWM, 2 * ANSWERED)
                self._again.bind(replay)
                self.replay = self._again.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self._context.destroy(0)
            raise
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamahybrid events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell what is still to be told, and end; may be called twice."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._send([wire.CLEARED])  # whoever listens may remember a process that was here before
            while not self._closing.is_set():
                self._look()
                self._answer(self._interval)
            self._look()
        finally:
            self._context.destroy(linger=100)

    def _answer(self, seconds: float) -> None:
        """Send again what is asked for, for so long."""
        if self._again is None:
            self._closing.wait(seconds)
            return
        if not self._again.poll(int(1000 * seconds)):
            return
        try:
            client, *_, start = self._again.recv_multipart()
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._sent):
                if sequence >= first:
                    self._again.send_multipart((client, b"", wire.number(sequence), payload))
            self._again.send_multipart((client, b"", wire.END, b""))
        except (ValueError, zmq.ZMQError) as error:
            logger.warning("a subscriber's question was not understood: %s", error)

    def _send(self, events: list[dict[str, Any]]) -> None:
        payload = wire.batch(events)
        self._sent.append((self._sequence, payload))
        self._out.send_multipart((self._topic, wire.number(self._sequence), payload))
        self._sequence += 1

    def _look(self) -> None:
        """Tell what has changed."""
        try:
            now = self._resumable()
        except Exception:  # a model that is just being closed, say: the next look will tell
            logger.debug("what can be resumed could not be told", exc_info=True)
            return
        events: list[dict[str, Any]] = []
        if self._sequence - self._anew >= ANEW:
            events, self._told = [wire.CLEARED], {}
            while self._sent[0][0] < self._anew:
                self._sent.popleft()
            self._anew = self._sequence
        for medium, blocks in now.items():
            events += wire.events_of(change(self._told.get(medium, {}), blocks), medium, self._size)
        self._told = now
        if events:
            self._send(events)

    def _resumable(self) -> dict[wire.Medium, dict[int, Block]]:
        """All blocks of each medium."""
        slots = self._llm.slots
        if not slots.runners:
            return {}
        first = slots.runners[0].live
        namespace = first.identity.namespace_of(SHARED)
        if namespace != self._namespace:
            self._namespace, self._blocks = namespace, {}
        view = first.blank_view(namespace)
        live = (tokens for name, tokens in (slot.glimpse() for slot in slots.all) if name == namespace)
        found: dict[wire.Medium, dict[int, Block]] = {"GPU": self._cut("GPU").of(live)}
        cache = self._llm.prompt_cache
        if cache is not None:
            found["CPU"] = self._cut("CPU").of(resumable.in_ram(cache, view))
            found["DISK"] = self._cut("DISK").of(resumable.on_disk_paths(cache, view))
        return found

    def _cut(self, medium: wire.Medium) -> Blocks:
        return self._blocks.setdefault(medium, Blocks(self._size, self._namespace))
