"""The engines that were built: what their manifests say, and what is wrong with their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llamahybrid.engine import activation, installed, sdist, storage
from tests.engine.conftest import Build, mismatch


def test_a_manifest_reads_as_it_was_written(built: Build) -> None:
    engine = built()
    assert installed.engines() == [engine]


@pytest.mark.parametrize("folder", [False, True])
def test_one_without_its_libraries_is_not_taken(built: Build, folder: bool) -> None:
    engine = replace(built(), files={})  # as an older version wrote it
    library = next(engine.libraries.glob("*llama*"))
    library.unlink()
    if folder:
        library.mkdir()
    assert "gone" in mismatch(engine)


def test_other_folders_in_the_cache_are_passed_over(built: Build) -> None:
    built(".part-x")  # still being made
    for name, text in {"broken": "{", "foreign": "[]", "empty": "{}"}.items():
        (sdist.cache_dir() / "engines" / name).mkdir(parents=True)
        (sdist.cache_dir() / "engines" / name / "manifest.json").write_text(text)
    (sdist.cache_dir() / "engines" / "odd" / "manifest.json").mkdir(parents=True)
    (sdist.cache_dir() / "engines" / "bare").mkdir()
    assert installed.engines() == []
    assert len(installed.unreadable()) == 5
    assert all("no manifest that can be read" in problem for problem in installed.unreadable())


@pytest.mark.parametrize(
    "harm",
    [{"patches": None}, {"patches": 3}, {"built": 5}, {"version": None}, {"source": []}, {"files": [1]}],
)
def test_a_manifest_with_other_things_in_it_is_none(built: Build, harm: dict[str, object]) -> None:
    good, odd = built("good"), built("odd")
    manifest = odd.folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **harm}))
    assert activation.wanted("") == good.libraries
    assert installed.engines() == [good]
    assert len(installed.unreadable()) == 1


def test_a_manifest_that_is_nested_without_end_is_none(built: Build) -> None:
    (built().folder / "manifest.json").write_text("[" * 100_000)
    assert installed.engines() == []
    assert activation.wanted("") is None


def test_a_cache_that_cannot_be_read_holds_no_engines(cache: Path) -> None:
    storage.folder(cache)
    (cache / "engines").touch()
    assert installed.engines() == []
    assert activation.wanted("") is None


def test_a_manifest_of_an_older_version_is_understood(built: Build) -> None:
    engine = replace(built(), files={})
    engine.write()
    manifest = engine.folder / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"compilers"', '"of_no_use"').replace(',\n  "files": {}', "")
    )
    assert installed.engines() == [], "a field that this version does not know"
    manifest.write_text(manifest.read_text().replace('"of_no_use"', '"compilers"'))
    assert installed.engines() == [engine]


def test_a_large_library_is_read_only_when_there_is_time(
    built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built()
    (engine.libraries / "libllama.so").write_bytes(b"abc")
    engine = replace(engine, files=installed.contents(engine.libraries))
    (engine.libraries / "libllama.so").write_bytes(b"123")
    monkeypatch.setattr(installed, "_QUICK", 2)
    assert engine.damage() == ""
    assert "content has changed" in engine.damage(thorough=True)
