"""Records of a folder, written at once."""

from __future__ import annotations

from collections.abc import Sequence

from llamahybrid.prompt_cache.disk import RecordStore


def write(store: RecordStore, key: str, parts: Sequence[bytes | memoryview]) -> None:
    """Write a record; it is there for everybody, whole, once this returns."""
    store.commit(store.prepare(key, parts), key)
