"""The tests that go upstream with a patch: programs in llama.cpp's own style, for its `tests/`.

They are compiled against the engine under test, with the headers of its release's sdist: one call of the
compiler each. Another release's headers would lay out the parameters otherwise.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from llamahybrid.engine import sdist

PROGRAMS = Path(__file__).parents[2] / "patches" / "tests"
GGML = ("ggml", "ggml-alloc", "ggml-backend", "ggml-cpu", "ggml-opt", "gguf")
HEADERS = (*(f"ggml/include/{name}.h" for name in GGML), "include/llama.h")
CASES = [
    ("test-recurrent-rollback-planes", "0001", "qwen35"),
    ("test-recurrent-nan", "0004", "mamba"),
    ("test-recurrent-seq-rm-all", "0005", "mamba"),
    ("test-recurrent-seq-rm-all", "0005", "qwen35"),
    ("test-state-pending-copy", "0010", "llama"),
    ("test-cb-eval-abort", "0011", "llama"),
    ("test-cb-eval-abort", "0011", "jamba"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """`compiled(name, libraries)`: the program, made once, linked to these libraries."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or ""]
    if sys.platform == "win32" or not compiler[0]:
        pytest.skip("no C++ compiler that is called as on Unix")
    headers = {sdist.member(f"vendor/llama.cpp/{header}").parent for header in HEADERS}
    out = tmp_path_factory.mktemp("programs")

    @cache
    def build(name: str, libraries: Path) -> Path:
        program = out / name
        links = [f"-L{libraries}", "-lllama", f"-Wl,-rpath,{libraries}"]
        links += [f"-Wl,-rpath-link,{libraries}"] if sys.platform == "linux" else []
        includes = [f"-I{folder}" for folder in headers]
        source = PROGRAMS / f"{name}.cpp"
        subprocess.run(
            [*compiler, "-std=c++17", "-Wall", *includes, source, "-o", program, *links], check=True
        )
        return program

    return build


def test_each_program_names_its_patch():
    names = {name: number for name, number, _ in CASES}
    assert {path.stem for path in PROGRAMS.glob("*.cpp")} == set(names)
    for name, number in names.items():
        assert f"({number})." in (PROGRAMS / f"{name}.cpp").read_text().partition("\n")[0]


@pytest.mark.parametrize(("name", "number", "arch"), CASES)
def test_the_program_succeeds(compiled, libraries, tiny_model, name, number, arch):
    """Without the patch of this number it must fail (conftest.py)."""
    program = compiled(name, libraries)
    quiet = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [program, tiny_model(arch)], env=quiet, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
