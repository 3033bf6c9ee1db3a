"""Buffers that give their memory back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid.harness.targets import base
from llamahybrid.prompt_cache import PromptCache, ram

MIB = 1 << 20


def resident() -> int:
    return base.resident(os.getpid()) or 0


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory as Linux tells it")
def test_memory_of_large_buffers_goes_back_at_once() -> None:
    np.ones(8 * MIB, np.uint8)  # the C library keeps freed pieces up to this size afterwards
    before = resident()
    small, large = [], []
    for _ in range(300):
        small.append(np.ones(2000, np.uint8))  # lies between the others, and stays
        large.append(ram.new_buffer(200_000))
        large[-1].fill(1)
    assert resident() - before > 50 * MIB
    large.clear()
    assert resident() - before < 10 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory as Linux tells it")
def test_large_buffers_take_their_size_and_give_it_back() -> None:
    size = ram.HUGE_BYTES + 300_000
    before = resident()
    buffers = [ram.new_buffer(size) for _ in range(12)]
    for buffer in buffers:
        buffer.fill(1)
    assert abs(resident() - before - 12 * size) < 2 * MIB
    del buffers[::2], buffer
    assert abs(resident() - before - 6 * size) < 2 * MIB


@pytest.mark.parametrize("n_bytes", [0, 1, ram.MAPPED_BYTES - 1, ram.MAPPED_BYTES, 3 * ram.MAPPED_BYTES + 5])
def test_a_buffer_is_writeable_and_all_there_is_of_it(n_bytes: int) -> None:
    buffer = ram.new_buffer(n_bytes)
    buffer[:] = 7
    assert (buffer.nbytes, buffer.dtype, int(buffer.sum())) == (n_bytes, np.uint8, 7 * n_bytes)


def test_without_another_mapping_memory_comes_from_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(ram.mmap, "mmap", none_left)
    assert ram.new_buffer(ram.MAPPED_BYTES).flags.owndata


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "4294967296\n"}, 512 * MIB),
        ("0::/\n", {"memory.max": "max\n"}, 4096 * MIB),
        ("0::/own.slice/a:b.service\n", {"own.slice/a:b.service/memory.max": "8589934592\n"}, 1024 * MIB),
        ("4:memory:/docker/1\n0::/\n", {"memory/memory.limit_in_bytes": "4294967296\n"}, 512 * MIB),
        ("4:memory:/own\n", {"memory/own/memory.limit_in_bytes": "9223372036854771712\n"}, 4096 * MIB),
        ("0::/\n", {"memory.max": "1048576\n"}, ram.MIN_RAM_BYTES),
        (None, {}, 4096 * MIB),
    ],
)
def test_a_container_has_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], limit: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    physical = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (32 << 30) // 4096}
    monkeypatch.setattr(ram.os, "sysconf", physical.__getitem__)
    monkeypatch.setattr(ram, "GROUPS", tmp_path)
    monkeypatch.setattr(ram, "OWN_GROUPS", tmp_path / "own")
    assert ram.default_ram_bytes() == limit


@pytest.mark.parametrize(("pages", "expected"), [(1 << 30, ram.MAX_RAM_BYTES), (None, ram.MIN_RAM_BYTES)])
def test_the_default_has_bounds_whatever_a_system_tells_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, pages: int | None, expected: int
) -> None:
    def told(name: str) -> int:
        if pages is None:
            raise ValueError(name)
        return {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}[name]

    monkeypatch.setattr(ram.os, "sysconf", told)
    monkeypatch.setattr(ram, "OWN_GROUPS", Path("nowhere"))
    monkeypatch.setattr(ram, "GROUPS", Path("nowhere"))
    assert PromptCache().ram_bytes == expected
