"""A store behind the RAM tier, in a folder or on a server: looked up by each prompt, written behind requests.

When a restore point there serves a prompt better than RAM does, its records are read, checked, and taken
into the RAM tier; everything else then happens there. A store that fails is never an error of a request: it
counts as a miss, and no request waits for a lock. A process that was forked goes on with the same store, with
nothing of its parent's that waits to be written.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from itertools import islice
from typing import ParamSpec, TypeAlias, TypeVar

import numpy as np

from llamahybrid.prompt_cache.base import Costs, LiveView, Loaded, Outside, Splitter, Tokens
from llamahybrid.prompt_cache.block_store import BlockStore, Busy, Rows, Stored
from llamahybrid.prompt_cache.blocks import Item, Offer, Seen, digest_at
from llamahybrid.prompt_cache.breaker import Breaker, Counts, ReadCosts
from llamahybrid.prompt_cache.disk import LOCK_SECONDS
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.loading import Loader
from llamahybrid.prompt_cache.nodes import common_prefix, ids_of, pinned_before
from llamahybrid.prompt_cache.store import RamStore
from llamahybrid.prompt_cache.worker import Late, Worker
from llamahybrid.prompt_cache.write_policy import DEFAULT_WRITE_BYTES, QUIET_SECONDS
from llamahybrid.prompt_cache.writer import Writer

logger = logging.getLogger("llamahybrid")

P = ParamSpec("P")
R = TypeVar("R")

FIRST_SECONDS = 2.0
"""The wait of a new cache for its store to open."""

CANCEL_SECONDS = 10.0
"""The longest wait of `forget` for a record that is being written, and for the removal."""

FLUSH_SECONDS = 60.0
"""The longest wait for all writes by default, and at the interpreter's end."""

UNKNOWN_SECONDS = {"disk": 5.0, "remote": 0.25}
"""The limit of a look-up or a read whose saving is unknown."""

MOST_SECONDS = 30.0
ENOUGH_SECONDS = 0.2
"""A timeout from this length on counts as a failure of the store."""

Placed: TypeAlias = tuple[str, bytes, list[Item]]
"""A checkpoint's namespace and token ids, and the records of its path."""

Glance: TypeAlias = tuple[list[Placed], bytes]
"""The newest checkpoints, and the key of the record that goes next, b"" where that is not known."""


class Tier:
    """Records of one store; at most `limit` bytes, shared with other processes.

    With a limit of 0 nothing is written, and nothing goes to make room for it.
    """

    def __init__(
        self,
        rows: Rows,
        limit: int,
        ram: RamStore,
        hourly: int | None = None,
        name: Outside = "disk",
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """`hourly`: bytes that may be written an hour; None: `DEFAULT_WRITE_BYTES`. `name`: what the user
        knows it as. `quiet_seconds`: see `write_policy`; 0: everything is written at once.

        Raises OSError when it cannot be used.
        """
        self.ram = ram
        self.rows = rows
        self.store = BlockStore(rows)
        self.limit = limit
        self.name = name
        self.counts = Counts()
        self.reading = Breaker(f"reading from the {name} cache", self.counts)
        self.writing = Breaker(f"writing to the {name} cache", self.counts)
        self.costs = ReadCosts()
        self.reader = Worker(f"llamahybrid-{name}-read", rows.release)
        self.writer = Writer(self, DEFAULT_WRITE_BYTES if hourly is None else hourly, quiet_seconds)
        self.loader = Loader(self.store, self.counts, name, self._remove_later)
        self._uncleared = False  # a clear has failed: no look-up until one succeeds
        self._glances: dict[int, Future[Glance]] = {}  # that run, by how many they look at
        _tiers.add(self)
        try:
            self.reader.call(FIRST_SECONDS, rows.open)
        except Busy as error:
            self.counts.late += 1
            self.reading.warn(error)

    # -- reading -----------------------------------------------------------------------------------

    def promote(self, tokens: Tokens, view: LiveView, costs: Costs) -> None:
        """Take the best restore point into RAM, if there is one that is deeper and comes cheaper.

        RAM knows then what the store knows of the prompt's path, too: where to cut depends on it.
        """
        ram, cached = self.ram, self.ram.known(tokens, view, costs).cached
        seen = self.look(view.namespace, tokens, (len(tokens) - cached) * costs.prefill_seconds)
        if seen is None or not seen.length:
            return
        self._take(seen, tokens, view, costs)
        known = ram.known(tokens, view, costs)
        parts = seen.length == known.length and len(seen.followers) > 1 and not known.branches
        if seen.length > known.length or parts:
            path = tokens[: seen.length].astype(np.int32)
            for longer in [np.append(path, np.int32(token)) for token in seen.followers] or [path]:
                ram.remember(view.namespace, longer, view.state, known.forgets)

    def _take(self, seen: Seen, tokens: Tokens, view: LiveView, costs: Costs) -> None:
        ram, total, anywhere = self.ram, len(tokens), view.attention_is_all
        limit = total if view.reuse_limit is None else min(total, view.reuse_limit)
        if anywhere:
            limit = min(limit, total - 1)  # no logits lie there
        if view.needs_attention and view.split is None:
            limit = min(limit, common_prefix(tokens, view.tokens))  # no other attention can be put back
        while True:
            known, serving = ram.known(tokens, view, costs), self.loader.serving(seen)
            offer = serving.offer(known.cached, limit, known.missing, anywhere=anywhere)
            if offer is None:
                return
            saved = (offer.position - known.cached) * costs.prefill_seconds
            few = offer.position - known.cached < min(MIN_SPACING, total - offer.position)
            if few or (saved and self.costs.seconds(offer.nbytes) > saved):
                return
            path = tokens[: offer.position]
            expected = ram.expect(view.namespace, path, offer.nbytes)
            if expected is None and anywhere:
                limit = offer.attention[-1].start  # a chat's beginning is of use, too
                continue
            if expected is not None:
                failed = self.counts.late + self.counts.errors
                loaded = self.load(view.namespace, tokens, offer, view.split, saved)
                if loaded is not None:
                    ram.insert_loaded(view, path, loaded, expected, known.forgets, self.name)
                    return
                if self.counts.late + self.counts.errors > failed:  # another look would be as late
                    return
                del expected
            limit = offer.position - 1  # never the same again, whatever the store says

    def look(self, namespace: str, tokens: Tokens, within: float | None = None) -> Seen | None:
        """Look a prompt up; None where the store cannot tell now. `within`: seconds that a hit saves."""
        if self._uncleared or self.reading.left():
            return None
        seconds = self._seconds(within) if self.rows.is_open() else LOCK_SECONDS
        return self._ask(seconds, lambda: self.opened(self.store.look, namespace, tokens))

    def _ask(self, seconds: float, look: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """The result of reading; None where the store cannot tell within `seconds`."""
        started = time.monotonic()
        try:
            return self.reader.call(seconds, look, *args, **kwargs)
        except Busy as error:
            self.counts.late += 1
            waited = time.monotonic() - started
            if self.name == "remote" and isinstance(error, Late) and waited >= ENOUGH_SECONDS:
                self.reading.failed(error)
        except Exception as error:  # no file in a folder is worth a request
            self.reading.failed(error)
        return None

    def _seconds(self, within: float | None) -> float:
        """The longest wait for a read that saves `within` seconds; at a folder no less than the default."""
        least = UNKNOWN_SECONDS[self.name]
        if self.name == "disk":
            return min(max(least, within or 0.0), MOST_SECONDS)
        return min(within or least, MOST_SECONDS)

    def load(
        self,
        namespace: str,
        tokens: Tokens,
        offer: Offer,
        split: Splitter | None,
        within: float | None = None,
    ) -> Loaded | None:
        """Read and check what an offer names for a prompt; None, with what is damaged removed, if that fails.

        `within`: seconds that it saves, and may take.
        """
        started, seconds = time.monotonic(), self._seconds(within)
        loaded = self._ask(seconds, self.loader.load, namespace, tokens, offer, split)
        took = time.monotonic() - started
        if loaded is not None or took >= seconds:  # what is refused at once measures nothing
            self.costs.measured(offer.nbytes, took)
        if loaded is not None:
            self.reading.worked()
            self.counts.loaded += 1
        return loaded

    # -- writing -----------------------------------------------------------------------------------

    def wrote(self, key: bytes, n_bytes: int) -> None:
        """A record was written."""
        self.loader.serves_again(key)
        self.counts.written += 1
        self.counts.written_bytes += n_bytes
        self.writing.worked()

    def _remove_later(self, key: bytes) -> None:
        """Have a record removed that did not prove right, before anything else is written."""
        if self.limit:
            with suppress(Late):  # no thread can be made
                self.writer.worker.post(self._remove, key)

    def _remove(self, key: bytes) -> bool:
        """Remove a record; False where the store does not let it go. On the writer's thread."""
        try:
            self.loader.leave_alone(key)
            self.opened(self.rows.remove, key)
            self.loader.serves_again(key)
        except OSError as error:
            self.writing.failed(error)
            return False
        return True

    def flush(self, seconds: float | None = None) -> bool:
        """Write the queue within `seconds` (None: a minute); False if a part of it is not written."""
        return self.writer.flush(FLUSH_SECONDS if seconds is None else seconds)

    def close(self, seconds: float | None = None) -> bool:
        """`flush`, and one warning where not all was written. The store may be used again afterwards."""
        done, told, self.writer.closed = self.flush(seconds), self.writer.closed, True
        if len(self.writer) and not told:
            logger.warning("%d states were not written to the %s cache", len(self.writer), self.name)
        self.writer.worker.stop()
        self.reader.stop()
        return done

    # -- forgetting --------------------------------------------------------------------------------

    def discard(self, namespace: str, tokens: Tokens) -> None:
        """Remove the checkpoint at the end of these tokens, which did not prove right.

        Its record serves nobody from now on, also where the store refuses at present.
        """
        self.loader.discard(b"r" + digest_at(namespace, ids_of(tokens)))

    def forget(self, tokens: Tokens, seconds: float = CANCEL_SECONDS) -> bool:
        """Remove every record of a path and of all that goes on from it, behind a write that runs.

        RAM has forgotten the path before: nothing of it that waits is written. False, with a warning, if the
        write takes longer than `seconds` (the removal comes after it), or if the store failed to remove
        something; `forget` may be called again.
        Records that end within a beginning which the user pinned stay.
        """
        stays = pinned_before(self.ram.pinned, tokens)
        return self._change("forget", seconds, self._forgot, tokens, stays)

    def clear(self, seconds: float = CANCEL_SECONDS) -> bool:
        """Remove every record, and what waits to be written. False: see `forget`."""
        self.writer.clear()
        return self._change("clear", seconds, self._cleared)

    def _change(
        self, what: str, seconds: float, change: Callable[P, bool], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Change the store behind the write that runs; False where that fails, or comes late.

        From inside the store, in a finalizer say, nothing is waited for: the change needs the lock, too.
        """

        def changed() -> bool:
            try:
                return change(*args, **kwargs)
            except Exception as error:  # a damaged index raises what it likes
                self.writing.failed(error)
                return False

        done = False
        try:
            future = self.writer.worker.post(changed)
            if self.ram.guard.inside():
                return False
            done = future.result(seconds)
        except (Late, NotYet, CancelledError):  # it is made later
            self.counts.late += 1
        if not done:
            logger.warning("not all is gone from the %s cache; %s it again", self.name, what)
        return done

    def opened(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of work on the open store.

        The work is tried once more if the folder was removed or the index damaged.
        """
        self.rows.open()
        try:
            return work(*args, **kwargs)
        except OSError:
            if self.rows.is_open():
                raise
        self.rows.open()
        return work(*args, **kwargs)

    def _cleared(self) -> bool:
        self._uncleared = True
        try:
            self.rows.clear()
            self._uncleared = False
        finally:
            RamStore.clear(self.ram)  # records that another thread has read from here since
        return True

    def _forgot(self, tokens: Tokens, stays: int) -> bool:
        keys = self.opened(self.store.unneeded, tokens, stays)
        done = all([self._remove(key) for key in keys if not key.startswith(b"n")])
        RamStore.forget(self.ram, tokens)  # records that another thread has read from here since
        self.store.remove_rows(keys)
        self.rows.forgotten()
        return done

    # -- statistics and views ----------------------------------------------------------------------

    def glance(self, most: int, seconds: float) -> Glance:
        """Look at the newest checkpoints, at most `most`, on the calling thread; nothing where the store is
        not open. The look ends after `seconds` with what was read by then; the result of a look that runs on
        another thread serves this call, too, if it comes within them.
        """
        mine = Future[Glance]()
        try:
            running = self._glances.setdefault(most, mine)
            if running is not mine:
                return running.result(seconds)
            mine.set_result(found := self._glanced(most, time.monotonic() + seconds))
            return found
        except Exception as error:  # a view is worth neither a pause of reading nor an error
            logger.debug("the %s cache was not looked at: %s", self.name, error)
            return [], b""
        finally:
            if self._glances.get(most) is mine:
                del self._glances[most]
                mine.cancel()  # unless it is done
                self.rows.release()

    def _glanced(self, most: int, end: float) -> Glance:
        stored, all_read = list[Stored](), True
        for one in islice(self.store.newest(), most):
            stored.append(one)
            if time.monotonic() >= end or len(stored) == most:
                all_read = False
                break
        sizes = self.rows.sizes(list({key for one in stored for key in one.keys}))
        used = self.rows.last_used(list(sizes)) if all_read else {}
        found = [(one.namespace, one.ids, one.items(sizes)) for one in stored]
        return [one for one in found if one[-1]], min(used, key=lambda key: used[key], default=b"")

    def stats(self) -> dict[str, int]:
        """Records, bytes and counts (`Counts`), for `PromptCache.stats`."""
        counts = {"records": self.rows.count(), "bytes": self.rows.nbytes, **vars(self.counts)}
        counts |= {"failed": int(self.writing.broken), "waiting": len(self.writer)}
        return {f"{self.name}_{name}": n for name, n in counts.items()}

    def fork(self) -> None:
        """In a process that was forked."""
        self._glances.clear()
        self.rows.fork()
        self.reader.fork()
        self.writer.fork()


def _in_child() -> None:
    for tier in list(_tiers):
        tier.fork()


def _at_exit() -> None:
    end = time.monotonic() + FLUSH_SECONDS
    for tier in list(_tiers):
        tier.close(max(0.0, end - time.monotonic()))


_tiers: weakref.WeakSet[Tier] = weakref.WeakSet()
atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
