"""What a disk refuses: for a while everything, or for good one record."""

from __future__ import annotations

import errno
import time

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
"""How long a disk that refused is left alone; twice as long each time it refuses again."""

UNREADABLE_SECONDS = 60.0
"""How long one record, or one folder of them, that cannot be read is left alone."""

MOST_UNREADABLE = 3
"""Records of one look that refuse to be read before the disk counts as refusing: each may take seconds."""

_OF_ONE = frozenset((errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP))


def of_one(error: BaseException) -> bool:
    """An error says something of one file or folder (its permissions, a bad sector), not of the disk."""
    return isinstance(error, NotADirectoryError) or (isinstance(error, OSError) and error.errno in _OF_ONE)


class Backoff:
    """How long a disk that refused is left alone."""

    def __init__(self) -> None:
        self._until = 0.0
        self._seconds = 0.0

    def left(self) -> float:
        """Seconds until it may be tried."""
        return max(0.0, self._until - time.monotonic())

    def over(self) -> bool:
        """It may be tried."""
        return not self.left()

    def failed(self) -> None:
        """It refused: leave it alone, longer each time."""
        self._seconds = min(LONGEST_BACKOFF_SECONDS, max(FIRST_BACKOFF_SECONDS, 2 * self._seconds))
        self._until = time.monotonic() + self._seconds

    def worked(self) -> None:
        """It did what was asked."""
        self._seconds = 0.0


class RefusedRecords:
    """Records that stay in the folder, and are of no use: by key."""

    def __init__(self) -> None:
        self.misplaced: set[str] = set()
        """Sound ones that are not what their name says."""
        self.stuck: dict[str, int] = {}
        """Bytes of those that could not be removed. Somebody wanted them gone: they serve nobody again."""
        self._unreadable: dict[str, float] = {}  # keys, or shards; when they are tried again

    def __contains__(self, key: str) -> bool:
        return key in self.stuck or key in self.misplaced or key in self._unreadable

    @property
    def nbytes(self) -> int:
        """Bytes that could not be freed."""
        return sum(self.stuck.values())

    def any_unreadable(self) -> bool:
        """What lies in the folder is not known to the last record."""
        return bool(self._unreadable)

    def unreadable(self, name: str) -> bool:
        """A record, or a shard, cannot be read; whether that is news."""
        new = name not in self._unreadable
        self._unreadable[name] = time.monotonic() + UNREADABLE_SECONDS
        return new

    def due(self) -> list[str]:
        """Names of what could not be read and may be tried again; they are forgotten here."""
        now = time.monotonic()
        due = [name for name, until in self._unreadable.items() if until <= now]
        for name in due:
            del self._unreadable[name]
        return due

    def seen(self, shard: str, there: set[str]) -> None:
        """A shard can be listed, and these keys are in it: others that were refused there are gone."""
        self._unreadable.pop(shard, None)
        for names in (self.stuck, self._unreadable):
            for key in [key for key in names if key.startswith(shard) and key not in there]:
                del names[key]

    def replaced(self, key: str) -> None:
        """A new record was written under this name, or what was there is removed."""
        self.stuck.pop(key, None)
        self._unreadable.pop(key, None)
        self.misplaced.discard(key)
