"""The lock of a build, on file systems without locks, too."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.engine.storage import locked_build_dir
from llamahybrid.errors import EngineError

BUILD = """
import errno, fcntl, os, sys
from pathlib import Path
from llamahybrid.engine.storage import locked_build_dir

def refused(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

fcntl.flock = refused
with locked_build_dir(Path(sys.argv[1]), lambda: print("waiting", flush=True)) as scratch:
    print(scratch, flush=True)
    sys.stdin.readline() or os._exit(1)
print("built", flush=True)
"""


def start(home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(home)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(build: subprocess.Popen[str]) -> str:
    assert build.stdout is not None
    return build.stdout.readline().strip()


def test_builds_without_flock_wait_for_each_other(tmp_path: Path) -> None:
    home = tmp_path / "engines" / "one"
    with start(home) as first:
        assert Path(said(first)).parent == home.parent
        with start(home) as second:
            assert said(second) == "waiting"
            first.communicate("\n", timeout=60)
            assert Path(said(second)).parent == home.parent
            assert second.communicate("\n", timeout=60)[0] == "built\n"


def test_killed_build_without_flock_leaves_no_lock(tmp_path: Path) -> None:
    home = tmp_path / "engines" / "one"
    with start(home) as killed:
        left = Path(said(killed))
        killed.kill()
    assert left.is_dir()
    with start(home) as build:
        lines = [said(build), said(build)] if (line := said(build)) == "waiting" else [line]
        assert not left.exists(), lines
        assert build.communicate("\n", timeout=60)[0].endswith("built\n")


def test_refused_lock_is_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(EngineError, match="no locks: set LLAMAHYBRID_CACHE_DIR"):
        locked_build_dir(tmp_path / "engines" / "one").__enter__()
