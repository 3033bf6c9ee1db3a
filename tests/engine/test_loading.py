"""The libraries that a process loads, on copies of stock's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.engine import bindings
from tests.engine.conftest import Build

SHOW = """
from pathlib import Path
from llama_cpp import llama_cpp, mtmd_cpp
for library in (llama_cpp._lib, mtmd_cpp._libmtmd):
    print(Path(library._name).parent.resolve())
"""


def run(code: str, code_of_child: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, code_of_child], capture_output=True, text=True, check=False
    )


def loads(folder: Path | None, code: str = f"import llamahybrid\n{SHOW}") -> str:
    """Assert that both libraries come from a folder; return stderr."""
    done = run(code)
    assert done.stdout.splitlines() == [str(folder)] * 2, done.stderr
    return done.stderr


def test_matching_engine_is_loaded_with_its_mtmd(built: Build) -> None:
    assert loads(built(real=True).libraries) == ""


def test_child_processes_choose_their_own_engine(built: Build) -> None:
    engine = built(real=True)
    code = f"""
import os, subprocess, sys
before = dict(os.environ)
import llamahybrid
import llama_cpp.mtmd_cpp
assert dict(os.environ) == before
assert "{engine.libraries}" == os.path.dirname(llama_cpp.llama_cpp._lib._name)
for first in ("", "import llamahybrid"):
    subprocess.run([sys.executable, "-c", first + sys.argv[1]], check=True)
"""
    done = run(code, SHOW)
    assert done.stdout.splitlines() == [str(bindings.stock())] * 2 + [str(engine.libraries)] * 2, done.stderr


@pytest.mark.parametrize("harm", ["truncated", "no library", "gone"])
def test_unloadable_engine_falls_back_to_stock_with_a_warning(built: Build, harm: str) -> None:
    engine = built(real=True, files={})  # of an older version, which wrote no sizes
    library = engine.libraries / "libggml-cpu.so.0"
    if not library.exists():
        library = engine.libraries / "libggml-cpu.so"
    if harm == "truncated":
        os.truncate(library, 0)
    elif harm == "no library":
        library.write_bytes(b"no library" * 1000)
    else:
        library.unlink()
    said = loads(bindings.stock())
    assert said.count("the patched engine cannot be loaded") == 1
    assert str(engine.libraries) in said
    assert "Traceback" not in said


def test_the_next_best_engine_is_tried(built: Build) -> None:
    built("best", real=True, files={}, built="2027").libraries.joinpath("libllama.so").write_bytes(b"")
    second = built("second", real=True)
    loads(second.libraries)


@pytest.mark.parametrize("wish", ["patched", "folder"])
def test_requested_engine_that_cannot_be_loaded_is_an_error(
    built: Build, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    engine = built(real=True, files={})
    good = (engine.libraries / "libllama.so").read_bytes()
    (engine.libraries / "libllama.so").write_bytes(b"")
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "patched" if wish == "patched" else str(engine.libraries))
    code = f"""
import sys, llamahybrid
try:
    import llama_cpp
except llamahybrid.EngineError as error:
    print("EngineError", error, file=sys.stderr)
open("{engine.libraries}/libllama.so", "wb").write(open(sys.argv[1], "rb").read())
{SHOW}
"""
    whole = engine.folder / "whole"
    whole.write_bytes(good)
    done = run(code, str(whole))
    assert "EngineError LLAMAHYBRID_ENGINE=" in done.stderr
    assert done.stdout.splitlines() == [str(engine.libraries)] * 2, "the second attempt succeeds"


@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_requested_damaged_engine_is_an_error(
    built: Build, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    engine = built(real=True)
    for library in engine.libraries.glob("libggml-cpu.*"):
        if harm == "cut":
            os.truncate(library, 500_000)  # the loader would die of SIGBUS
        elif not library.is_symlink():
            library.write_bytes(library.read_bytes()[:-1] + b"?")
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", str(engine.libraries))
    done = run("import llamahybrid, llama_cpp")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert ("500000 bytes, not" if harm == "cut" else "its content has changed") in last
    assert last.endswith("run `llamahybrid engine build` again")


def test_requested_engine_of_another_release_loads_with_a_warning(
    built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built(real=True, version="0.3.0")
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", str(engine.libraries))
    said = loads(engine.libraries)
    assert said.count("made for llama-cpp-python 0.3.0, installed is") == 1
    assert len(said.splitlines()) == 1


def test_llama_cpp_lib_path_is_respected(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    built("patched", real=True)
    own = built(".own", real=True).libraries
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(own))
    monkeypatch.setenv("MTMD_CPP_LIB", str(own))
    loads(own)
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "stock")
    loads(bindings.stock())
