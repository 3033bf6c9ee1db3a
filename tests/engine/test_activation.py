"""Which engine `import llamahybrid` chooses: the wish, what was built, and what is loaded already."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path

import pytest

from llamahybrid.engine import activation, choice, installed, sdist, storage
from llamahybrid.engine.choice import Site
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.recipe import Recipe
from llamahybrid.errors import EngineError

Build = Callable[..., Engine]


def mismatch(engine: Engine) -> str:
    return choice.mismatch(engine, Site.here())


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_nothing_built_means_stock(cache: Path) -> None:
    assert activation.wanted("") is None


def test_the_latest_one_is_taken(built: Build) -> None:
    later = built("later", built="2026-02-01T00:00:00+00:00")
    built("earlier")
    assert activation.wanted("patched") == later.libraries


def test_a_manifest_reads_as_it_was_written(built: Build) -> None:
    engine = built()
    assert installed.engines() == [engine]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.3.0"}, "made for llama-cpp-python 0.3.0"),
        ({"patches": {"0001.patch": "0"}}, "patches have changed"),
        ({"source": "/elsewhere"}, "built from /elsewhere"),
        ({"recipe": replace(Recipe.here(), platform="plan9")}, "another machine"),
        ({"recipe": replace(Recipe.here(), cpu="z80")}, "another machine"),
    ],
)
def test_one_that_does_not_match_is_not_taken(built: Build, changes: dict[str, object], reason: str) -> None:
    engine = built(**changes)
    assert reason in mismatch(engine)
    assert activation.wanted("") is None


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


def test_any_folder_of_libraries_can_be_chosen(built: Build) -> None:
    engine = built(source="/elsewhere")
    assert activation.wanted(str(engine.libraries)) == engine.libraries


def test_a_folder_may_be_named_from_here_or_from_home(
    cache: Path, built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built()
    monkeypatch.chdir(engine.folder)
    monkeypatch.setenv("HOME", str(cache))
    assert activation.wanted("lib") == engine.libraries
    assert activation.wanted("~/engines/one/lib") == engine.libraries


def test_without_llama_cpp_python_nothing_matches(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    engine = built()
    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert activation.stock() is None
    assert "installed is none" in mismatch(engine)


def test_patched_without_a_build_says_how_to_build(cache: Path) -> None:
    with pytest.raises(EngineError, match="llamahybrid engine build"):
        activation.wanted("patched")


def test_a_folder_without_libraries_is_refused(cache: Path) -> None:
    with pytest.raises(EngineError, match="no libllama and no libmtmd"):
        activation.wanted(str(cache))


@pytest.mark.parametrize(("wish", "warnings"), [("stock", 0), ("", 1)])
def test_llama_cpp_imported_first_is_warned_of_when_another_engine_was_wanted(
    built: Build, monkeypatch: pytest.MonkeyPatch, wish: str, warnings: int
) -> None:
    built()
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", wish)
    run = child("import llama_cpp, llamahybrid; print(llama_cpp.llama_cpp._lib._name)")
    assert run.stderr.count("imported before llamahybrid") == warnings
    assert Path(run.stdout.strip()).parent.resolve() == activation.stock()
    assert "LLAMA_CPP_LIB_PATH" not in os.environ


def test_blanks_around_the_wish_do_not_count(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", " stock ")
    activation.activate()
