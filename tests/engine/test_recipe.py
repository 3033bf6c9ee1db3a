"""The key of a build: everything that changes it, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.engine import recipe, sdist
from llamahybrid.engine.recipe import Recipe


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe.identity.cache_clear()
    for name, _ in Recipe.options_here():
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "name", ["CMAKE_ARGS", "CC", "CXXFLAGS", "CUDAARCHS", "SKBUILD_CMAKE_DEFINE", "HIPCXX"]
)
def test_key_depends_on_build_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = Recipe.here()
    monkeypatch.setenv(name, "")
    assert Recipe.here() == before, "an empty option is none"
    monkeypatch.setenv(name, "a value with spaces")
    assert Recipe.here() != before


def compiler(path: Path, version: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'a compiler'\necho 'release {version}' >&2\n")
    path.chmod(0o755)
    recipe.identity.cache_clear()  # as another process would see it
    return path


@pytest.mark.parametrize("how", ["PATH", "CC", "CMAKE_ARGS", "ccache"])
def test_key_depends_on_the_compiler_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = tmp_path / ("my tools" if how in ("PATH", "CC") else "tools")
    path = compiler(folder / "cc", "1.0")
    if how == "PATH":
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    elif how == "CMAKE_ARGS":
        monkeypatch.setenv("CMAKE_ARGS", f"-DGGML_BLAS=on -DCMAKE_C_COMPILER:FILEPATH={path}")
    else:
        monkeypatch.setenv("CC", str(path) if how == "CC" else f"env A=b {path}")
    old = Recipe.here()
    assert dict(old.compilers)["C"] == "release 1.0"
    compiler(path, "1.1")
    assert dict(Recipe.here().compilers)["C"] == "release 1.1"
    assert Recipe.here() != old


def test_gpu_compiler_counts_only_if_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDACXX", str(compiler(tmp_path / "nvcc", "12.4")))
    assert "CUDA" not in dict(Recipe.here().compilers)
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert dict(Recipe.here().compilers)["CUDA"] == "release 12.4"


ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$1 $2" in "-m pip") echo "$@" >> pip.txt ;; *) exec {} "$@" ;; esac
"""


def test_make_venv_never_takes_a_wheel_of_other_options_from_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip takes a wheel that it built before for the same sdist, whatever CMAKE_ARGS were then."""
    archive = tmp_path / "cache" / "sdist" / sdist.PIN.archive
    archive.parent.mkdir(parents=True)
    archive.symlink_to(sdist.fetch())
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "llamahybrid").symlink_to(ROOT / "llamahybrid")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / ".created").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON.format(sys.executable))
    python.chmod(0o755)
    for options in ("", "-DGGML_BLAS=on", ""):
        command = ["make", "--always-make", "--assume-old=.venv/.created", ".venv/.engine"]
        environment = {**os.environ, "CMAKE_ARGS": options}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    first, other, again = (tmp_path / "pip.txt").read_text().splitlines()
    assert f"--cache-dir {tmp_path}/cache/" in first
    assert f"llama-cpp-python @ {archive.as_uri()}" in first
    assert first == again != other
