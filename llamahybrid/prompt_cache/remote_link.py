"""The connection to a Redis or Valkey server: what may take its time, on threads that no request waits for.

One thread asks twice a second what others have stored and removed, keeps what it was told, and sends what is
to be changed. Another reads records; who asked waits no longer than he says. A server that is slow, paused or
gone makes calls raise OSError at once, until it has answered again.

On the server, below a prefix of this format's: `record:KEY` the record; `shard:X` the set of keys that begin
with X; `changes` a hash of counters, one a shard, that grow with every change; `epoch` a random name of this
data, so that an emptied server is not taken for one that did not change. Commands are those of Redis 4.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.disk_folder import SHARDS
from llamahybrid.prompt_cache.lateness import ReadLate
from llamahybrid.prompt_cache.remote_changes import PREFIX, record
from llamahybrid.prompt_cache.remote_reads import Noted, Server, is_misfit

logger = logging.getLogger("llamahybrid")

POLL_SECONDS = 0.5
STALE_SECONDS = 3.0
"""A server that has not answered for so long is taken to be away."""

PART_SECONDS = 3600
"""A record that nobody finished goes by itself."""


@dataclass(frozen=True)
class News:
    """A shard as it was told last."""

    listed: frozenset[str]
    noted: dict[str, Noted]
    """Of those that are new."""
    sent: int
    """The last of our own changes that was sent before."""


@dataclass(frozen=True)
class Change:
    """What is to be sent."""

    run: Callable[[Any], None]
    key: str = ""
    """The record that comes or goes; "" for none."""
    comes: bool = False
    number: int = 0


class Link:
    """What another process stored, as it was told last; and what is to be told.

    There is no lock: what passes between threads is put and taken in one piece, so that a finaliser or a
    signal handler may come anywhere, and ask for anything.
    """

    def __init__(self, url: str) -> None:
        """`url`: as redis-py takes it, "redis://host:6379/0". Raises ValueError for what is none."""
        self.server = Server(url)
        self._client = self.server.client
        self.news: dict[str, News] = {}
        """By shard; who takes one out has it."""
        self.refused = 0
        """Changes that the server did not want; they are not sent again."""
        self._known: dict[str, set[str]] = {shard: set() for shard in SHARDS}  # the polling thread's
        self._closed = False
        self._begun = self._finished = 0
        self._number = 0
        self._start_anew()

    def _start_anew(self) -> None:
        """Nothing waits and nothing runs: in a process that was forked, whatever its parent had to do."""
        self._pid = os.getpid()
        self._threads: dict[str, threading.Thread] = {}
        self._claims = {"poll": threading.Lock(), "read": threading.Lock()}  # never waited for
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._reading: _Read | None = None
        self._outbox: deque[Change] = deque()
        self._sent = self._number
        self._asked: deque[str] = deque()
        self._counters: dict[str, tuple[bytes | None, bytes | None]] = {}

    # -- for requests: nothing here asks the server ------------------------------------------------

    def check(self) -> None:
        """Raise OSError where the server has not answered lately."""
        self._alive()
        if self._away(self.server.answered):
            raise OSError("the remote cache does not answer")

    def ask(self, key: str) -> None:
        """Have a record's head told again; of a shard's letter alone, which records there are."""
        self._asked.append(key)

    def wait(self, seconds: float) -> bool:
        """Wait until the server has been asked once more, at most so long; whether it answered.

        One that has been away for `STALE_SECONDS` meanwhile is not waited for any longer.
        """
        needed = self._begun + 1
        return self._until(lambda: self._finished >= needed, seconds)

    def settle(self, seconds: float) -> bool:
        """Wait in the same way until all changes were sent; whether they were."""
        return self._until(lambda: not self._outbox, seconds)

    def _until(self, reached: Callable[[], bool], seconds: float) -> bool:
        self._alive()
        if threading.current_thread() in self._threads.values():  # a finaliser: it would wait for itself
            return reached()
        began = time.monotonic()
        while not reached():
            away = self._away(max(began, self.server.answered))
            if self._closed or away or time.monotonic() - began >= seconds:
                return False
            if self._wake.empty():
                self._wake.put(None)
            time.sleep(0.005)
        return True

    def later(self, run: Callable[[Any], None], key: str = "", *, comes: bool = False) -> int:
        """Have `run(client)` done soon, in order; its number. `key`: the record that `comes`, or goes."""
        self._alive()
        if key:
            self._number += 1
        self._outbox.append(Change(run, key, comes, self._number if key else 0))
        self._wake.put(None)
        return self._number

    def read(self, key: str, seconds: float) -> bytes | None:
        """A whole record, or None where there is none. Raises ReadLate where it takes longer than so long,
        RecordError where it is of another type, OSError where the server does not answer."""
        self.check()
        running = self._reading
        if running is not None and running.given_up:
            raise ReadLate("the remote cache is slow: what was given up is still being read")
        read = _Read(key)
        self._reads.put(read)
        if not read.done.wait(seconds):
            read.given_up = True
            raise ReadLate(f"the remote cache took longer than {seconds:.3f} s")
        if is_misfit(read.error):
            raise RecordError("what lies there is of another type")
        if read.error is not None:
            raise OSError(f"the remote cache: {read.error}")
        return read.value

    def _away(self, since: float) -> bool:
        return time.monotonic() - since > STALE_SECONDS

    # -- for the writer's thread -------------------------------------------------------------------

    def upload(self, parts: Sequence[bytes | memoryview]) -> str:
        """Store a record that is none yet; its name. Raises OSError."""
        part = f"{PREFIX}:part:{secrets.token_hex(8)}"
        try:
            self._client.set(part, b"".join(parts), ex=PART_SECONDS)
        except redis.RedisError as error:
            raise OSError(f"the remote cache: {error}") from error
        return part

    # -- the threads -------------------------------------------------------------------------------

    def _alive(self) -> None:
        """Make the threads, again where they are not there: in a process that was forked, say."""
        if self._pid != os.getpid():
            self._start_anew()
        if self._closed:
            return
        for name, run in (("poll", self._poll_on), ("read", self._read_on)):
            thread = self._threads.get(name)
            if thread is None or not thread.is_alive():
                serve = partial(self._claimed, self._claims[name], run)
                thread = threading.Thread(target=serve, name=f"llamahybrid remote {name}", daemon=True)
                self._threads[name] = thread
                with suppress(RuntimeError):  # the interpreter is ending
                    thread.start()

    def _claimed(self, claim: threading.Lock, run: Callable[[], None]) -> None:
        """Two threads may have been made at once: one of them leaves."""
        if claim.acquire(blocking=False):
            try:
                run()
            finally:
                claim.release()

    def close(self) -> None:
        """Let the threads end, when what waits to be sent was tried once more; in a finaliser, too."""
        self._closed = True
        self._wake.put(None)
        self._reads.put(None)

    def _poll_on(self) -> None:
        last = False
        while not last:
            last = self._closed
            with suppress(queue.Empty):
                while True:
                    self._wake.get_nowait()
            self._begun += 1
            number = self._begun
            try:
                self._send()
                if not last:
                    self._poll()
                self.server.answered = time.monotonic()
                self._finished = number
            except redis.RedisError as error:
                logger.debug("the remote cache: %s", error)
            except Exception:
                logger.exception("the remote cache cannot be followed")
            if not last:
                with suppress(queue.Empty):
                    self._wake.get(timeout=POLL_SECONDS)

    def _send(self) -> None:
        while self._outbox:
            change = self._outbox[0]
            try:
                change.run(self._client)
                known = self._known[change.key[0]] if change.key else set[str]()
                (known.add if change.comes else known.discard)(change.key)
            except redis.ResponseError as error:  # it would never come to the others
                self.refused += 1
                if change.key:
                    self._known[change.key[0]].discard(change.key)
                    self._asked.append(change.key[0])
                logger.debug("the remote cache refused a change: %s", error)
            self.server.answered = time.monotonic()
            self._sent = max(self._sent, change.number)
            self._outbox.popleft()

    def _poll(self) -> None:
        """Take note of what changed."""
        asked: set[str] = set()
        while self._asked:
            asked.add(self._asked.popleft())
        try:
            epoch, counters = self.server.changes()
            for shard, counter in zip(SHARDS, counters, strict=True):
                again = {key for key in asked if key[0] == shard}
                if again or self._counters.get(shard) != (epoch, counter):
                    self._counters.pop(shard, None)
                    if self._follow(shard, again):  # else it is asked again
                        self._counters[shard] = (epoch, counter)
                    asked -= again
        finally:
            self._asked.extend(asked)

    def _follow(self, shard: str, again: set[str]) -> bool:
        """Read a shard's keys, and the heads of those that are new, or asked for; False for no shard of ours,
        where nothing lies."""
        sent, known = self._sent, self._known[shard]
        listed = self.server.listed(shard)
        there, noted = set[str](), dict[str, Noted]()
        if listed is not None:
            noted = self.server.heads(sorted((listed - known) | (listed & again)))
            there = (known & listed) | noted.keys()
        self._known[shard] = there
        earlier = self.news.pop(shard, None)  # nobody has taken it yet
        if earlier is not None:
            noted = {key: n for key, n in (earlier.noted | noted).items() if key in there}
        self.news[shard] = News(frozenset(there), noted, sent)
        return listed is not None

    def _read_on(self) -> None:
        while (read := self._reads.get()) is not None:
            if read.given_up:
                continue
            self._reading = read
            try:
                read.value = self._client.get(record(read.key))
                self.server.answered = time.monotonic()
            except redis.RedisError as error:
                read.error = error
            except BaseException as error:
                read.error = error
                raise
            finally:
                self._reading = None
                read.done.set()
                del read  # else it would stay here until the next one


class _Read:
    """A record that is asked for."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.done = threading.Event()
        self.value: bytes | None = None
        self.error: BaseException | None = None
        self.given_up = False
        """Nobody waits for it any more."""
