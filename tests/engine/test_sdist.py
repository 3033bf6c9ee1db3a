"""The pinned sdist: hashes, atomic steps, and messages that say what to do.

A small archive stands in for the real one, and a stand-in for pip hands it over.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import platformdirs
import pytest

from llamahybrid.engine import sdist
from llamahybrid.errors import EngineError
from tests.engine.fake_pip import FILES, Index, litter


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    assert sdist.cache_dir() == tmp_path
    monkeypatch.delenv("LLAMAHYBRID_CACHE_DIR")
    assert sdist.cache_dir().name == "llamahybrid"


@pytest.mark.parametrize("answer", [RuntimeError("no home"), Path("~/.cache/llamahybrid")])
def test_a_user_without_a_home_folder_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, answer: Path | RuntimeError
) -> None:
    def find(*_: object, **__: object) -> Path:
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.delenv("LLAMAHYBRID_CACHE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", find)
    with pytest.raises(EngineError, match="set LLAMAHYBRID_CACHE_DIR to a folder"):
        sdist.cache_dir()
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(EngineError, match="LLAMAHYBRID_CACHE_DIR=~nobody-of-that-name/x: nobody"):
        sdist.cache_dir()


def test_it_is_fetched_once(index: Index) -> None:
    first = sdist.fetch()
    assert first.read_bytes() == index.content
    assert sdist.fetch() == first
    assert index.asked == 1
    assert not litter(sdist.cache_dir())


def test_a_damaged_copy_is_fetched_again(index: Index) -> None:
    sdist.fetch().write_bytes(index.content[:-1])
    assert sdist.fetch().read_bytes() == index.content
    assert index.asked == 2


def test_another_hash_is_refused_and_not_kept(index: Index) -> None:
    index.content += b"!"
    with pytest.raises(EngineError, match="pip config list"):
        sdist.fetch()
    assert not [path for path in sdist.cache_dir().rglob("*") if path.is_file()]


def test_what_pip_said_is_passed_on(index: Index) -> None:
    index.failure = "No matching distribution found"
    with pytest.raises(EngineError, match="No matching distribution"):
        sdist.fetch()
    assert not litter(sdist.cache_dir())


def test_a_release_whose_hash_is_not_known_is_taken_as_it_comes(index: Index) -> None:
    index.unknown = True
    assert sdist.obtain("9.9.9") == sdist.PIN
    assert sdist.fetch().read_bytes() == index.content
    assert index.asked == 1
    assert not litter(sdist.cache_dir())


def test_a_file_that_somebody_named_so_is_not_taken_for_the_release(index: Index, tmp_path: Path) -> None:
    """Its hash would become the pin of that release."""
    index.unknown = True
    (tmp_path / "mine").write_bytes(b"changed")
    assert sdist.take(tmp_path / "mine", "9.9.9") != sdist.PIN
    assert sdist.obtain("9.9.9") == sdist.PIN


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
def test_a_file_that_is_no_sdist_is_refused_and_writes_nowhere(
    index: Index, tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    pin = sdist.take(tmp_path / "file", "9.9.9")
    with pytest.raises(EngineError, match=said):
        sdist.unpack(tmp_path / "room" / "tree", pin)
    assert not list(tmp_path.rglob("out"))


def test_an_old_python_unpacks_nothing_that_is_not_pinned(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "file").write_bytes(index.content)
    for unpinned in (lambda: sdist.take(tmp_path / "file", "9.9.9"), lambda: sdist.obtain("9.9.9")):
        with pytest.raises(EngineError, match=r"3\.10\.12"):
            unpinned()
    assert sdist.unpack(tmp_path / "tree")


def test_an_sdist_that_lies_somewhere_is_kept_as_a_fetched_one(index: Index, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_bytes(index.content)
    assert sdist.take(file, "9.9.9") == sdist.take(file, "9.9.9") == sdist.PIN
    assert sdist.fetch().read_bytes() == file.read_bytes()
    assert index.asked == 0


def test_a_member_is_taken_out_once(index: Index) -> None:
    path = sdist.member("vendor/llama.cpp/models/a.gguf")
    assert path.read_bytes() == FILES["vendor/llama.cpp/models/a.gguf"]
    index.failure = "offline"
    sdist.fetch().unlink()
    assert sdist.member("vendor/llama.cpp/models/a.gguf") == path


def test_a_member_of_another_release_is_taken_out_of_that_one(index: Index, tmp_path: Path) -> None:
    """Both sdists have the file, and it is not the same."""
    name = "vendor/llama.cpp/include/llama.h"
    content = b"of 9.9.8"
    with tarfile.open(tmp_path / "older", "w:gz") as archive:
        info = tarfile.TarInfo(f"llama_cpp_python-9.9.8/{name}")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    older = sdist.take(tmp_path / "older", "9.9.8")
    path = sdist.member(name, older)
    assert path.read_bytes() == content
    sdist.fetch(older).unlink()
    assert sdist.member(name, older) == path
    with pytest.raises(EngineError, match=r"9\.9\.9\.tar\.gz holds no file"):
        sdist.member(name)


@pytest.mark.parametrize(
    "name", ["models/none.gguf", "../llama_cpp_python-9.9.9.tar.gz", "/etc/hostname", "vendor"]
)
def test_what_is_no_member_is_an_error(index: Index, name: str) -> None:
    sdist.member("pyproject.toml")  # the archive itself lies where the second one points to
    with pytest.raises(EngineError, match=r"9\.9\.9"):
        sdist.member(name)


def test_what_is_to_be_run_is_read_out_of_the_archive(index: Index) -> None:
    name = "vendor/llama.cpp/models/a.gguf"
    sdist.member(name).write_bytes(b"changed by somebody")
    assert sdist.read(name) == {name: FILES[name]}
    with pytest.raises(EngineError, match="holds no file"):
        sdist.read(name, "nothing")


def test_the_whole_tree_without_its_top_folder(index: Index, tmp_path: Path) -> None:
    tree = sdist.unpack(tmp_path / "tree")
    assert {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()} == set(FILES)
    (tmp_path / "empty").mkdir()
    assert sdist.unpack(tmp_path / "empty") == tmp_path / "empty"
    for taken in (tree, tree / "pyproject.toml"):
        with pytest.raises(EngineError, match="in the way"):
            sdist.unpack(taken)
    assert not litter(tmp_path)
