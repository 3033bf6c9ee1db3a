"""Digests of files: every byte counts, and a kept digest is never another file's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid.engine import content
from llamahybrid.engine.content import digest

SIZE = 300_000


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large and settled, in pieces of 64 KiB; digests are kept in `tmp_path`."""
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in {"SMALL": 0, "PIECE": 1 << 16, "THREADS": 3, "SETTLED_SECONDS": 0}.items():
        monkeypatch.setattr(content, name, value)
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(SIZE))
    touch(path)
    return path


def touch(path: Path) -> None:
    """Write the time until the file system shows another one."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        os.utime(path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    touch(path)


def was_read(path: Path) -> bool:
    """Tell whether the digest reads the file."""
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(True)
        return True

    digest(path, wanted)
    return bool(asked)


@pytest.mark.parametrize("at", [0, 65_535, 65_536, SIZE - 1])
def test_digest_depends_on_every_bit(file: Path, at: int) -> None:
    before = digest(file)
    flip(file, at)
    assert digest(file) != before
    flip(file, at)
    assert digest(file) == before


def test_digest_depends_on_order_and_length(file: Path) -> None:
    whole, names = file.read_bytes(), set()
    for data in (whole, whole[65_536:131_072] + whole[:65_536] + whole[131_072:], bytes(7), bytes(8)):
        file.write_bytes(data)
        touch(file)
        names.add(digest(file))
    assert len(names) == 4


def test_unchanged_file_is_read_once(file: Path) -> None:
    assert was_read(file)
    assert not was_read(file)


def test_edit_with_restored_mtime_is_detected(file: Path) -> None:
    status, before = file.stat(), digest(file)
    flip(file, 200_000)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(file) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda memory: memory.write_text(memory.read_text()[:-20]),
        lambda memory: memory.write_text(memory.read_text().replace("files", "fails")),
        lambda memory: memory.write_text(memory.read_text().replace('": "', '": "x')),
        lambda memory: memory.chmod(0o666),
    ],
    ids=["cut off", "another form", "another name", "others can write it"],
)
def test_untrusted_kept_digest_is_not_used(
    file: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    name = digest(file)
    damage(tmp_path / "cache" / "digests.json")
    assert was_read(file)
    assert digest(file) == name
