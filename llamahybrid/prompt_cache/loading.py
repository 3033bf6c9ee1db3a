"""Records of a store read, checked and cut to what a prompt needs of them."""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.base import NOTHING, Loaded, Outside, Segment, Splitter, Tokens
from llamahybrid.prompt_cache.block_store import BlockStore
from llamahybrid.prompt_cache.blocks import Item, Offer, Seen
from llamahybrid.prompt_cache.breaker import Counts
from llamahybrid.prompt_cache.envelope import Record

logger = logging.getLogger("llamahybrid")

UNREADABLE_SECONDS = 60.0
"""The pause after a record that cannot be read."""

_ONE_FILE = frozenset((errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP, errno.ENOTDIR))
"""Errors of one file or folder (its permissions, a bad sector), not of the store."""


class Loader:
    """Reads what offers name; knows which records do not serve. On one thread at a time."""

    def __init__(
        self, store: BlockStore, counts: Counts, name: Outside, remove: Callable[[bytes], None]
    ) -> None:
        """`remove(key)`: removes a record, later."""
        self._store = store
        self._counts = counts
        self._name = name
        self._remove = remove
        self._left_alone: dict[bytes, float] = {}  # keys, and until when

    def serving(self, seen: Seen) -> Seen:
        """The same without records that do not serve now."""
        now = time.monotonic()
        return replace(seen, items=tuple(i for i in seen.items if self._left_alone.get(i.key, now) <= now))

    def leave_alone(self, key: bytes, seconds: float = math.inf) -> None:
        """Let a record not serve for `seconds`."""
        self._left_alone[key] = time.monotonic() + seconds

    def serves_again(self, key: bytes) -> None:
        """A record is gone, or was written anew."""
        self._left_alone.pop(key, None)

    def discard(self, key: bytes) -> None:
        """Leave a record alone that did not prove right, until it is removed."""
        self.leave_alone(key)
        self._remove(key)

    def load(self, namespace: str, tokens: Tokens, offer: Offer, split: Splitter | None) -> Loaded | None:
        """Read the records of an offer for a prompt; None where it does not serve. Raises OSError."""
        # All are read: what else is damaged of this offer goes with it.
        read = {item: self._read(namespace, tokens, item) for item in offer.items}
        records = {item: record for item, record in read.items() if record is not None}
        if len(records) < len(read):
            return None
        segments: list[Segment] = []
        for item in offer.attention:
            path = item.tokens(tokens)
            stored = Segment(item.start, len(path), records[item].state, split)
            try:
                part = stored.part(path, item.start, min(item.end, offer.position))
            except ValueError as error:
                self._damaged(item.key, error)
                return None
            segments += [] if part is None else [part]
        if offer.checkpoint is None:
            return Loaded(NOTHING, None, tuple(segments))
        checkpoint = records[offer.checkpoint]
        if offer.checkpoint.logits and checkpoint.logits is None:  # another process wrote it without them
            self._damaged(offer.checkpoint.key, RecordError("a record has not the logits that its row names"))
            return None
        return Loaded(checkpoint.state, checkpoint.logits, tuple(segments))

    def _read(self, namespace: str, tokens: Tokens, item: Item) -> Record | None:
        """Read a record of a prompt's path; None where it does not serve. Raises OSError."""
        try:
            return self._store.read(namespace, tokens, item)
        except RecordGone:
            self._counts.gone += 1
            self.discard(item.key)
        except RecordError as error:
            self._damaged(item.key, error)
        except OSError as error:
            if error.errno not in _ONE_FILE:
                raise
            self._counts.errors += 1
            self.leave_alone(item.key, UNREADABLE_SECONDS)
            logger.warning("a record of the %s cache cannot be read, and is left out: %s", self._name, error)
        return None

    def _damaged(self, key: bytes, error: Exception) -> None:
        logger.warning("a record of the %s cache is dropped: %s", self._name, error)
        self._counts.damaged += 1
        self.discard(key)
