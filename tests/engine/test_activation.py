"""Which engine `import llamahybrid` chooses: the wish, what was built, and what is loaded already."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from llamahybrid.engine import activation, installed, sdist, series
from llamahybrid.engine.build import Recipe
from llamahybrid.engine.installed import Engine
from llamahybrid.errors import EngineError

SHOW = "import os; print(os.environ.get('LLAMA_CPP_LIB_PATH'), os.environ.get('MTMD_CPP_LIB'))"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LLAMAHYBRID_ENGINE", "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    return tmp_path


def build(name: str = "one", **changes: object) -> Engine:
    """A folder as `engine build` leaves it, with empty libraries."""
    facts = {
        "version": activation.version(),
        "recipe": Recipe.here(),
        "patches": series.patches(),
        "source": "",
        "symbols": ("llama_n_rs_seq",),
        "built": "2026-01-01T00:00:00+00:00",
        "seconds": 1.0,
    }
    engine = Engine(folder=installed.home() / name, **{**facts, **changes})  # type: ignore[arg-type]
    engine.libraries.mkdir(parents=True)
    for library in ("llama", "mtmd"):
        (engine.libraries / f"lib{library}{installed._SUFFIXES[0]}").touch()
    engine.write()
    return engine


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_nothing_built_means_stock(cache: Path) -> None:
    assert child(f"import llamahybrid; {SHOW}").stdout.split() == ["None", "None"]


def test_a_patched_engine_that_matches_is_taken_mtmd_too(cache: Path) -> None:
    lib = str(build().libraries)
    assert child(f"import llamahybrid; {SHOW}").stdout.split() == [lib, lib]


def test_the_latest_one_is_taken(cache: Path) -> None:
    later = build("later", built="2026-02-01T00:00:00+00:00")
    build("earlier")
    assert activation.wanted("patched") == later.libraries


def test_a_manifest_reads_as_it_was_written(cache: Path) -> None:
    engine = build()
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
def test_one_that_does_not_match_is_not_taken(cache: Path, changes: dict[str, object], reason: str) -> None:
    engine = build(**changes)  # type: ignore[arg-type]
    assert reason in engine.mismatch(activation.version())
    assert activation.wanted("") is None


@pytest.mark.parametrize("folder", [False, True])
def test_one_without_its_libraries_is_not_taken(cache: Path, folder: bool) -> None:
    engine = build()
    library = next(engine.libraries.glob("*llama*"))
    library.unlink()
    if folder:
        library.mkdir()
    assert "gone" in engine.mismatch(activation.version())


def test_other_folders_in_the_cache_are_passed_over(cache: Path) -> None:
    build(".part-x")  # still being made
    for name, text in {"broken": "{", "foreign": "[]", "empty": "{}"}.items():
        (sdist.cache_dir() / "engines" / name).mkdir(parents=True)
        (sdist.cache_dir() / "engines" / name / "manifest.json").write_text(text)
    (sdist.cache_dir() / "engines" / "odd" / "manifest.json").mkdir(parents=True)
    assert installed.engines() == []


def test_stock_can_be_chosen_and_undoes_what_a_parent_chose(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(build().libraries))
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "stock")
    assert child(f"import llamahybrid; {SHOW}").stdout.split() == ["None", "None"]


def test_a_library_path_of_the_users_own_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/own")
    assert child(f"import llamahybrid; {SHOW}").stdout.split() == ["/own", "None"]


def test_any_folder_of_libraries_can_be_chosen(cache: Path) -> None:
    engine = build(source="/elsewhere")
    assert activation.wanted(str(engine.libraries)) == engine.libraries


def test_a_folder_may_be_named_from_here_or_from_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    monkeypatch.chdir(engine.folder)
    monkeypatch.setenv("HOME", str(cache))
    assert activation.wanted("lib") == engine.libraries
    assert activation.wanted("~/engines/one/lib") == engine.libraries


def test_without_llama_cpp_python_nothing_matches(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    engine = build()
    for function in ("version", "distribution"):
        monkeypatch.setattr(metadata, function, missing)
    assert activation.stock() is None
    assert "installed is none" in engine.mismatch(activation.version())


def test_patched_without_a_build_says_how_to_build(cache: Path) -> None:
    with pytest.raises(EngineError, match="llamahybrid engine build"):
        activation.wanted("patched")


def test_a_folder_without_libraries_is_refused(cache: Path) -> None:
    with pytest.raises(EngineError, match="no libllama and no libmtmd"):
        activation.wanted(str(cache))


@pytest.mark.parametrize(("wish", "warnings"), [("stock", 0), ("", 1)])
def test_llama_cpp_imported_first_is_warned_of_when_another_engine_was_wanted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, wish: str, warnings: int
) -> None:
    build()
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", wish)
    run = child(f"import llama_cpp, llamahybrid; {SHOW}")
    assert run.stderr.count("imported before llamahybrid") == warnings
    assert run.stdout.split() == ["None", "None"]
    assert "LLAMA_CPP_LIB_PATH" not in os.environ
