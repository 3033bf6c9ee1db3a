"""The engine that `import llamahybrid` chooses, by request, built engines and loaded libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llamahybrid.engine import activation, bindings
from llamahybrid.engine.recipe import Recipe
from llamahybrid.errors import EngineError
from tests.engine.conftest import Build, mismatch


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_stock_is_used_if_nothing_was_built(cache: Path) -> None:
    assert activation.resolve("") is None
    with pytest.raises(EngineError, match="llamahybrid engine build"):
        activation.resolve("patched")
    cache.mkdir()
    with pytest.raises(EngineError, match="no libllama and no libmtmd"):
        activation.resolve(str(cache))


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
def test_incompatible_engine_is_not_used(built: Build, changes: dict[str, object], reason: str) -> None:
    engine = built(**changes)
    assert reason in mismatch(engine)
    assert activation.resolve("") is None


def test_requested_folder_may_be_relative_or_in_home(
    cache: Path, built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built(source="/elsewhere")
    assert activation.resolve(str(engine.libraries)) == engine.libraries
    monkeypatch.chdir(engine.folder)
    monkeypatch.setenv("HOME", str(cache))
    assert activation.resolve("lib") == engine.libraries
    assert activation.resolve("~/engines/one/lib") == engine.libraries


@pytest.mark.parametrize(("wish", "warnings"), [("stock", 0), ("", 1)])
def test_importing_llama_cpp_first_warns_of_another_engine(
    built: Build, monkeypatch: pytest.MonkeyPatch, wish: str, warnings: int
) -> None:
    built()
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", wish)
    run = child("import llama_cpp, llamahybrid; print(llama_cpp.llama_cpp._lib._name)")
    assert run.stderr.count("imported before llamahybrid") == warnings
    assert Path(run.stdout.strip()).parent.resolve() == bindings.stock()
    assert "LLAMA_CPP_LIB_PATH" not in os.environ


@pytest.mark.parametrize("wish", ["patched", "/nowhere"])
def test_missing_engine_is_an_error_when_llama_cpp_loads(
    cache: Path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", wish)
    run = child("import llamahybrid; print('there'); from llamahybrid import PromptCache, Llama")
    assert run.stdout == "there\n"
    assert run.stderr.splitlines()[-1].startswith(
        f"llamahybrid.errors.EngineError: LLAMAHYBRID_ENGINE={wish}"
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--version", 0, "llama-cpp-python"),
        ("engine list", 0, "no engine was built"),
        ("engine doctor", 0, "cannot be loaded: LLAMAHYBRID_ENGINE="),
        ("chat {}", 1, "error: LLAMAHYBRID_ENGINE="),
    ],
)
def test_diagnostic_commands_run_without_the_requested_engine(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, code: int, said: str
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "patched")
    run = subprocess.run(
        [sys.executable, "-m", "llamahybrid", *words.format(model).split()], capture_output=True, text=True
    )
    assert run.returncode == code
    assert said in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_truncated_library_is_an_error_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading half a copy of a library is a bus error."""
    stock = bindings.stock()
    assert stock is not None
    for path in stock.glob("*.so"):
        (tmp_path / path.name).write_bytes(path.read_bytes()[:100_000])
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", str(tmp_path))
    run = child("import llamahybrid; from llamahybrid import Llama")
    assert run.returncode == 1
    assert run.stderr.rstrip().endswith("is cut short: copy or build it again")
