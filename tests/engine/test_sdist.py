"""The pinned sdist: hashes, atomic steps, and messages that say what to do.

The archive is small, and pip is a fake.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from llamahybrid.engine import sdist
from llamahybrid.errors import EngineError
from tests.engine.fake_pip import Index, litter
from tests.lab import rebase


def test_sdist_is_fetched_once(index: Index) -> None:
    first = sdist.fetch()
    assert first.read_bytes() == index.content
    assert sdist.fetch() == first
    assert index.asked == 1
    assert not litter(sdist.cache_dir())


def test_damaged_sdist_is_fetched_again(index: Index) -> None:
    sdist.fetch().write_bytes(index.content[:-1])
    assert sdist.fetch().read_bytes() == index.content
    assert index.asked == 2


def test_sdist_of_another_hash_is_refused(index: Index) -> None:
    index.content += b"!"
    with pytest.raises(EngineError, match="pip config list"):
        sdist.fetch()
    assert not list((sdist.cache_dir() / "sdist").iterdir())


def _packed(**more: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        member = tarfile.TarInfo("llama_cpp_python-9.9.9/pyproject.toml")
        for name, kept in {"name": member.name, **more}.items():
            setattr(member, name, kept)
        archive.addfile(member)
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no archive", "cannot be unpacked"),
        (_packed()[:40], "cannot be unpacked"),
        (_packed(name="llama_cpp_python-9.9.9/../../out"), "cannot be unpacked"),
        (_packed(name="else/pyproject.toml"), "no llama_cpp_python"),
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


@pytest.mark.parametrize(
    "name", ["models/none.gguf", "../llama_cpp_python-9.9.9.tar.gz", "/etc/hostname", "vendor"]
)
def test_unknown_members_are_errors(index: Index, name: str) -> None:
    sdist.member("pyproject.toml")  # the archive itself lies where the second one points to
    with pytest.raises(EngineError, match=r"9\.9\.9"):
        sdist.member(name)
