"""PromptCache: conversations in one tree in RAM, with a folder and a server behind it if they are given."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from llamahybrid.prompt_cache.base import (
    HERE_ONLY,
    CacheStats,
    Checkpoint,
    Costs,
    LiveView,
    Plan,
    Tokens,
)
from llamahybrid.prompt_cache.disk import DiskRows
from llamahybrid.prompt_cache.ram import default_ram_bytes
from llamahybrid.prompt_cache.store import RamStore
from llamahybrid.prompt_cache.tier import Tier
from llamahybrid.prompt_cache.write_policy import REMOTE_QUIET_SECONDS, restart_points

logger = logging.getLogger("llamahybrid")

MAX_DISK_BYTES = 32 << 30
DEFAULT_REMOTE_BYTES = 8 << 30
DISK_SHARE = 1 / 4
"""The default disk budget, at most: this share of the free space."""


class PromptCache(RamStore):
    """Checkpoints and attention segments of many conversations in a radix tree of tokens.

    `ram_bytes`: budget of RAM. None: an eighth of physical memory (or of a container's limit), 256 MiB to 8
    GiB.
    `disk_dir`: folder for later processes of this machine; several processes may share it.
    `disk_bytes`: budget of the folder; 0 only reads. None: a quarter of the free space, at most 32 GiB.
    `disk_write_bytes`: bytes that this process may write in an hour; 0: none. None: 8 GiB.
    `remote`: Redis or Valkey server shared by machines, "redis://host:6379/0"; its `maxmemory` is the
    budget.
    `remote_bytes`: 0 only reads.

    Threads and models may share a cache. A folder or server that cannot be used costs a warning.

    >>> cache = PromptCache(ram_bytes=1 << 20)
    >>> cache.stats().entries
    0
    """

    def __init__(
        self,
        ram_bytes: int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        disk_write_bytes: int | None = None,
        *,
        remote: str | None = None,
        remote_bytes: int = DEFAULT_REMOTE_BYTES,
    ) -> None:
        """Raises ValueError for an unreadable URL or a negative budget, TypeError for a budget that is no
        number, ImportError without the package redis.
        """
        limit = default_ram_bytes() if ram_bytes is None else budget("ram_bytes", ram_bytes)
        disk_bytes = None if disk_bytes is None else budget("disk_bytes", disk_bytes)
        if disk_write_bytes is not None:
            disk_write_bytes = budget("disk_write_bytes", disk_write_bytes)
        remote_bytes = budget("remote_bytes", remote_bytes)
        super().__init__(limit)
        self._contexts: WeakSet[object] = WeakSet()
        self.disk: Tier | None = None
        """The folder's tier; None without a folder, or if it cannot be used."""
        self.remote: Tier | None = None
        """The server's tier; None without a server."""
        server: dict[str, Any] = {} if remote is None else {"remote": remote, "remote_bytes": remote_bytes}
        self._arguments = (disk_dir, disk_bytes, disk_write_bytes), server
        if disk_dir is not None:
            folder = Path(disk_dir)
            try:
                folder = folder.expanduser()  # RuntimeError: nobody knows that home
                disk_limit = MAX_DISK_BYTES if disk_bytes is None else disk_bytes
                self.disk = Tier(DiskRows(folder), disk_limit, self, disk_write_bytes)
                if disk_bytes is None:
                    default = self.disk.writer.default_limit = partial(default_disk_bytes, folder)
                    self.disk.limit = default(self.disk.rows.nbytes)
            except (OSError, RuntimeError, ValueError) as error:  # ValueError: no path has such letters
                logger.warning("the disk cache in %s cannot be used: %s", folder, error)
        if remote is not None:
            from llamahybrid.prompt_cache.remote import RemoteRows

            rows, quiet = RemoteRows(remote), REMOTE_QUIET_SECONDS
            self.remote = Tier(rows, remote_bytes, self, sys.maxsize, "remote", quiet)

    @property
    def outside(self) -> tuple[Tier, ...]:
        """The tiers outside this process, the nearest first."""
        return tuple(tier for tier in (self.disk, self.remote) if tier is not None)

    def __reduce__(self) -> tuple[Callable[..., PromptCache], tuple[object, ...]]:
        """Pickle as an empty cache with the same budgets: state belongs to the process that made it."""
        disk, remote = self._arguments
        made = partial(type(self), **remote) if remote else type(self)
        return made, (self.ram_bytes, *disk)

    @property
    def ram_bytes(self) -> int:
        """Budget of RAM in bytes; a smaller one evicts at once.

        Raises TypeError for a value that is no number, ValueError for a negative one.
        """
        return self.account.limit

    @ram_bytes.setter
    def ram_bytes(self, n_bytes: int) -> None:
        self.resize(budget("ram_bytes", n_bytes))

    # -- a request's start -------------------------------------------------------------------------

    def attach(self, context: object) -> None:
        """Note a context that stores here, until it is collected."""
        self._contexts.add(context)

    @property
    def serves_others(self) -> bool:
        """True if other contexts or processes may ask for a kept state at any time."""
        return self.leaves_process or len(self._contexts) > 1

    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        """Choose the restore point and the cuts for a prompt; entries of the plan are pinned while it exists.

        Better restore points on disk or server are taken into RAM first. `boundaries`: positions in
        (0, len(tokens)) where a message or a marked part of one starts, ascending.
        """
        if view.needs_checkpoints or view.attention_is_all:
            for tier in self.outside:
                tier.promote(tokens, view, costs)
        return super().plan(tokens, view, boundaries, costs)

    def queue_writes(self, view: LiveView) -> None:
        """Queue what is new on the live path for disk and server: a request is over."""
        if not self.outside or view.namespace.endswith(HERE_ONLY):
            return
        path = view.tokens.copy()
        if not view.storable or (view.needs_attention and view.split is None):
            return  # it was forgotten, or its attention cannot be restored
        points = self.look(lambda store: restart_points(store.tree.match(view.namespace, path)))
        for tier in self.outside:
            tier.writer.later(view.namespace, path, points, attention=view.needs_attention)

    @property
    def leaves_process(self) -> bool:
        """True if states are written to a folder or a server, for later and other processes."""
        return bool(self.outside)

    def flush(self, seconds: float | None = None) -> bool:
        """Write pending records, for at most `seconds` (None: 60); return whether all are written."""
        return all([tier.flush(seconds) for tier in self.outside])

    def close(self) -> bool:
        """Flush, with a warning if records are left; RAM stays and the cache remains usable."""
        return all([tier.close() for tier in self.outside])

    # -- the user's pins and removals --------------------------------------------------------------

    def pin(self, prefix: Sequence[int] | Tokens) -> int:
        """Keep the checkpoints on this path in RAM and on disk, now and later; return their number.

        `unpin` and `clear` remove a pin. Raises as `forget`.
        """
        return super().pin(token_path(prefix))

    def unpin(self, prefix: Sequence[int] | Tokens) -> None:
        """Remove a pin; harmless without one. Raises as `forget`."""
        super().unpin(token_path(prefix))

    def forget(self, prefix: Sequence[int] | Tokens) -> int:
        """Remove this token path and everything behind it; return the freed bytes.

        Shared and pinned beginnings stay. Unknown tokens at the end of the path do not matter. Live state on
        the path is not stored any more, and its slot is cleared at its next request. Removes records on disk
        and server, too. An empty path removes nothing. Raises TypeError for values that are no token ids,
        ValueError for ids out of range.
        """
        tokens = token_path(prefix)
        if not len(tokens):
            return 0
        freed = super().forget(tokens)  # first, so that nothing can be queued again
        for tier in self.outside:
            tier.forget(tokens)
        return freed

    def drop(self, checkpoint: Checkpoint) -> Tokens | None:
        """Remove a checkpoint that did not prove right, from disk and server, too; return its tokens."""
        path = super().drop(checkpoint)
        if path is not None:
            for tier in self.outside:
                tier.discard(checkpoint.namespace, path)
        return path

    def clear(self) -> None:
        """Remove everything stored, on disk and server, too; live state and entries in use stay."""
        super().clear()  # first: a request that ends now has nothing of it to write
        for tier in self.outside:
            tier.clear()

    # -- looking in --------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return sizes and counters; `extra` has further counters."""
        stats = super().stats()
        for tier in self.outside:
            stats.extra.update(tier.stats())
        return stats


def budget(name: str, n_bytes: object) -> int:
    """Whole bytes of the argument `name`; infinity becomes `sys.maxsize`.

    Raises TypeError for a value that is no number, ValueError for a negative one or NaN.
    """
    if isinstance(n_bytes, bool) or not isinstance(n_bytes, int | float | np.integer):
        raise TypeError(f"{name}: give a number of bytes, as 4 << 30, not {n_bytes!r}")
    if not n_bytes >= 0:  # NaN, too
        raise ValueError(f"{name}: give a number of bytes, 0 or more, not {n_bytes!r}")
    return int(min(n_bytes, sys.maxsize))


def token_path(prefix: Sequence[int] | Tokens) -> Tokens:
    """A copy of a user's token ids, shape (n,). Raises TypeError for other values, ValueError for ids beyond
    32 bits.
    """
    given = np.asarray(prefix)
    if given.ndim != 1 or (len(given) and not np.issubdtype(given.dtype, np.integer)):
        raise TypeError(f"give token ids, as `llm.tokenize` does, not {type(prefix).__name__}")
    ids = given.astype(np.int32)
    if not np.array_equal(ids, given):
        raise ValueError("a token id has 32 bits")
    return ids


def default_disk_bytes(folder: Path, held: int = 0) -> int:
    """A quarter of the free space of the file system of `folder`, at most `MAX_DISK_BYTES`.

    `held`: bytes of the records that are there, which would be free without them.
    """
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return min(MAX_DISK_BYTES, int((shutil.disk_usage(there).free + held) * DISK_SHARE))
