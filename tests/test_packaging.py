"""Contents of wheel and sdist: the package with its types and the patches; no tests, no benchmarks.

setuptools is asked for its file lists in a copy of the checkout: no network, no engine, nothing compiled.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="an older one cannot read pyproject.toml")

HERE = Path(__file__).parents[1]
WASTE = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "results")

PATCHES = {path.relative_to(HERE).as_posix() for path in (HERE / "patches").rglob("*") if path.is_file()}
PACKAGE = {
    path.relative_to(HERE).as_posix()
    for path in (HERE / "llamahybrid").rglob("*")
    if path.suffix in (".py", ".html", ".css", ".js", ".md", ".txt", ".xml") or path.name == "py.typed"
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in, with everything that must stay out."""
    copy = tmp_path_factory.mktemp("checkout")
    for file in (
        "llamahybrid_pytest.py",
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
    ):
        shutil.copy(HERE / file, copy)
    for folder in ("llamahybrid", "native", "patches", "tests", "benchmarks", "examples", "docs"):
        shutil.copytree(HERE / folder, copy / folder, ignore=WASTE)
    return copy


def setup(checkout: Path, *arguments: str) -> None:
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_wheel_holds_the_package_its_types_and_the_patches(checkout: Path, tmp_path: Path) -> None:
    setup(checkout, "build_py", "--build-lib", str(tmp_path))
    wheel = {name for name in files_of(tmp_path) if "__pycache__" not in name}
    assert wheel == PACKAGE | {f"llamahybrid/{name}" for name in PATCHES} | {"llamahybrid_pytest.py"}
    assert "llamahybrid/py.typed" in wheel


def test_files_of_an_earlier_build_are_not_in_the_wheel(checkout: Path, tmp_path: Path) -> None:
    old = tmp_path / "llamahybrid" / "patches" / "0.3.1" / "series"
    old.parent.mkdir(parents=True)
    old.touch()
    (tmp_path / "llamahybrid" / "gone.py").touch()
    setup(checkout, "build_py", "--build-lib", str(tmp_path))
    assert not old.exists()
    assert not (tmp_path / "llamahybrid" / "gone.py").exists()
    assert (tmp_path / "llamahybrid" / "py.typed").exists()


def test_sdist_holds_all_sources_and_no_tests(checkout: Path, tmp_path: Path) -> None:
    setup(checkout, "egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        inside = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    assert inside >= PACKAGE | PATCHES | {"llamahybrid_pytest.py"}
    assert inside >= {"native/shim.cpp", "native/shim.cdef.h", "native/build_shim.py", "setup.py", "LICENSE"}
    extra = {name.partition("/")[0] for name in inside} & {"tests", "benchmarks", "examples", "docs"}
    assert not extra
