"""The pytest plugin, and the example: green on what is sound, red on what is not; and light when unused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import loaded_after

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/test_reuse.py"
BROKEN = ROOT / "tests/evaluate/broken.py"
TEST_LIB = os.environ.get("LLAMAHYBRID_TEST_LIB")


def session(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A pytest session with the plugin, installed or not, and none of this project's settings."""
    command = [sys.executable, "-m", "pytest", "-p", "llamahybrid_pytest", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(folder), "-q", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_loading_it_loads_neither_llamahybrid_nor_llama_cpp_nor_numpy() -> None:
    loaded = loaded_after("import llamahybrid_pytest")
    assert "llamahybrid_pytest" in loaded
    assert not [
        name for name in loaded if name.split(".")[0] in ("llamahybrid", "llama_cpp", "numpy", "rich")
    ]


def test_it_is_an_entry_point() -> None:
    said = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\nllamahybrid = "llamahybrid_pytest"\n' in said


def test_a_session_that_uses_nothing_of_it_does_not_choose_an_engine(tmp_path: Path) -> None:
    none = "assert not {'llamahybrid', 'llama_cpp', 'numpy'} & sys.modules.keys()"
    (tmp_path / "test_other.py").write_text(f"import sys\n\ndef test():\n    {none}\n")
    done = session(tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_example_is_ten_lines() -> None:
    body = EXAMPLE.read_text(encoding="utf-8").splitlines()[1:]
    assert len([line for line in body if line.strip()]) <= 10


def test_the_example_is_green_on_what_reuses_rightly(tmp_path: Path) -> None:
    done = session(tmp_path, str(EXAMPLE), "-k", "chat")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("StalePlane", "the answer is not that of a context that reused nothing"),
        ("NeverHits", "known tokens were reused (0%), at least 90% should be"),
        ("SaysMore", "what it reports is not so"),
    ],
)
def test_the_example_is_red_on_a_broken_cache(tmp_path: Path, name: str, said: str) -> None:
    done = session(tmp_path, str(EXAMPLE), "-k", "chat", "--llamahybrid-target", f"class:{BROKEN}:{name}")
    assert done.returncode == 1, done.stdout
    assert said in done.stdout


@pytest.mark.skipif(TEST_LIB is None, reason="needs the patched engine in LLAMAHYBRID_TEST_LIB")
def test_the_whole_example_is_green_on_a_sound_engine(tmp_path: Path) -> None:
    done = session(tmp_path, str(EXAMPLE), "--llamahybrid-lib", str(TEST_LIB))
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
