"""The pytest plugin: the example passes on a sound cache, fails on a broken one, and loads nothing unused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.engine import series
from llamahybrid.engine.sdist import PIN
from tests.lab.patched_library import PATCHED, PATCHES

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/test_reuse.py"
HARDENED = {series.number(name) for name in series.patches(PIN.version, series.HARDENING)} <= PATCHES


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


def test_session_without_its_fixtures_loads_no_engine(tmp_path: Path) -> None:
    none = "assert not {'llamahybrid', 'llama_cpp', 'numpy'} & sys.modules.keys()"
    (tmp_path / "test_other.py").write_text(f"import sys\n\ndef test():\n    {none}\n")
    done = session(tmp_path)
    assert done.returncode == 0, done.stdout


def test_example_passes_on_llamahybrid(tmp_path: Path) -> None:
    done = session(tmp_path, str(EXAMPLE), "-k", "chat")
    assert done.returncode == 0, done.stdout


def test_example_fails_where_nothing_is_reused(tmp_path: Path) -> None:
    done = session(tmp_path, str(EXAMPLE), "-k", "chat", "--llamahybrid-target", "stock")
    assert done.returncode == 1, done.stdout
    assert "known tokens were reused (0%), at least 90% should be" in done.stdout


@pytest.mark.full
@pytest.mark.patched
@pytest.mark.skipif(not HARDENED, reason="hazards that the hardening patches cure hit every other engine")
def test_example_passes_on_the_hardened_engine(tmp_path: Path) -> None:
    done = session(tmp_path, str(EXAMPLE), "--llamahybrid-lib", PATCHED)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
