"""The pinned sdist: hashes, atomic steps, and messages that say what to do.

The archive is small, and pip is a fake.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamahybrid.engine import sdist
from llamahybrid.errors import EngineError
from tests.lab import rebase

FILES = {"pyproject.toml": b"[project]\n", "vendor/llama.cpp/models/a.gguf": b"GGUF" * 100}


def packed(files: dict[str, bytes], top: str = "llama_cpp_python-9.9.9") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Index:
    """A fake `pip download` that counts its calls."""

    content, asked = packed(FILES), 0

    def run(self, command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.asked += 1
        assert "--require-hashes" in command
        assert sdist.PIN.sha256 in Path(command[-1]).read_text()
        Path(command[command.index("--dest") + 1], sdist.PIN.archive).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setattr(sdist, "PIN", sdist.Pin("9.9.9", hashlib.sha256(index.content).hexdigest()))
    monkeypatch.setattr(subprocess, "run", index.run)
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    return index


def test_sdist_is_fetched_once(index: Index) -> None:
    first = sdist.fetch()
    assert first.read_bytes() == index.content
    assert sdist.fetch() == first
    assert index.asked == 1
    assert not list(sdist.cache_dir().rglob(".part-*"))


def test_damaged_sdist_is_fetched_again(index: Index) -> None:
    sdist.fetch().write_bytes(index.content[:-1])
    assert sdist.fetch().read_bytes() == index.content
    assert index.asked == 2


def test_sdist_of_another_hash_is_refused(index: Index) -> None:
    index.content += b"!"
    with pytest.raises(EngineError, match="pip config list"):
        sdist.fetch()
    assert not list((sdist.cache_dir() / "sdist").iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no archive", "cannot be unpacked"),
        (packed(FILES)[:40], "cannot be unpacked"),
        (packed({"../../out": b""}), "cannot be unpacked: it has files outside"),
        (packed(FILES, "else"), "no llama_cpp_python"),
    ],
    ids=["noise", "cut off", "above", "another"],
)
def test_invalid_archive_is_refused_and_writes_nothing(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
) -> None:
    index.content = content
    monkeypatch.setattr(sdist, "PIN", sdist.Pin("9.9.9", hashlib.sha256(content).hexdigest()))
    with pytest.raises(EngineError, match=said):
        sdist.unpack(tmp_path / "room" / "tree")
    assert not list(tmp_path.rglob("out"))


def test_old_python_refuses_unpinned_archives(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with pytest.raises(EngineError, match=r"3\.10\.12"):
        rebase.obtain("9.9.9")
    assert sdist.unpack(tmp_path / "tree")
