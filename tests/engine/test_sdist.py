"""The pinned sdist: hashes, atomic steps, and messages that say what to do.

A small archive stands in for the real one, and a stand-in for pip hands it over.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llamahybrid.engine import sdist
from llamahybrid.errors import EngineError
from tests.engine.fake_pip import FILES, Index, litter


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    assert sdist.cache_dir() == tmp_path
    monkeypatch.delenv("LLAMAHYBRID_CACHE_DIR")
    assert sdist.cache_dir().name == "llamahybrid"


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


def test_a_member_is_taken_out_once(index: Index) -> None:
    path = sdist.member("vendor/llama.cpp/models/a.gguf")
    assert path.read_bytes() == FILES["vendor/llama.cpp/models/a.gguf"]
    index.failure = "offline"
    sdist.fetch().unlink()
    assert sdist.member("vendor/llama.cpp/models/a.gguf") == path


@pytest.mark.parametrize(
    "name", ["models/none.gguf", "../llama_cpp_python-9.9.9.tar.gz", "/etc/hostname", "vendor"]
)
def test_what_is_no_member_is_an_error(index: Index, name: str) -> None:
    sdist.member("pyproject.toml")  # the archive itself lies where the second one points to
    with pytest.raises(EngineError, match=r"9\.9\.9"):
        sdist.member(name)


def test_the_whole_tree_without_its_top_folder(index: Index, tmp_path: Path) -> None:
    tree = sdist.unpack(tmp_path / "tree")
    assert {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()} == set(FILES)
    (tmp_path / "empty").mkdir()
    assert sdist.unpack(tmp_path / "empty") == tmp_path / "empty"
    for taken in (tree, tree / "pyproject.toml"):
        with pytest.raises(EngineError, match="in the way"):
            sdist.unpack(taken)
    assert not litter(tmp_path)
