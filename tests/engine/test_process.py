"""One step of a build: what its output tells, and that its end reaches all it started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.engine import process
from llamahybrid.errors import EngineError


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("  [3/120] Building CXX object src/a.cpp.o\n", (3, 120, "Building CXX object src/a.cpp.o")),
        ("[ 42%] Built target ggml\n", (42, 100, "Built target ggml")),
        ("  *** Configuring CMake...\n", (0, 0, "Configuring CMake")),
        ("-- Detecting CXX compiler features\n", None),
    ],
)
def test_build_output_tells_progress(line: str, step: tuple[int, int, str] | None) -> None:
    assert process.read_step(line) == step


def run(script: str, log: Path, progress: process.Progress = lambda *_: None) -> None:
    process.run([sys.executable, "-c", script], progress, log, "no luck")


def test_success_leaves_no_log(tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    script = "import sys; sys.stdout.buffer.write(b'no \\xff text\\n[1/2] one\\n'); print('more')"
    run(script, tmp_path / "log", lambda *step: steps.append(step))
    assert steps == [(1, 2, "one")]
    assert not (tmp_path / "log").exists()


def test_a_failure_ends_with_the_last_lines_and_the_log_has_all(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(EngineError, match=f"no luck.*{log}") as caught:
        run("for i in range(30): print('line', i)\nraise SystemExit(3)", log)
    assert str(caught.value).endswith("line 28\nline 29\n")
    assert "line 3\n" not in str(caught.value)
    assert len(log.read_text().splitlines()) == 30


def test_what_was_to_be_made_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no luck"):
        process.run([sys.executable, "-c", ""], lambda *_: None, tmp_path / "log", "no luck", made=bool)


def test_a_disk_that_the_compiler_finds_full_is_named(tmp_path: Path) -> None:
    says = "print('fatal error: writing to x.o: No space left on device')\n" + "print('more')\n" * 30
    with pytest.raises(EngineError, match="the disk is full"):
        run(says + "raise SystemExit(1)", tmp_path / "log")


@pytest.mark.parametrize(("deaf", "how"), [(False, signal.SIGTERM), (True, signal.SIGKILL)])
def test_an_end_reaches_the_children_too_and_by_force_if_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool, how: signal.Signals
) -> None:
    """A pipe that the child of the build holds open is closed only when both are gone."""
    monkeypatch.setattr(process, "_PATIENCE", 0.1 if deaf else 10.0)
    start, started = subprocess.Popen, []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **kw: started.append(start(*a, pass_fds=[held], **kw)) or started[-1]
    )
    seen, held = os.pipe()
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if deaf else ""
    script = f"{ignore}import os, time\nos.fork()\nprint('[1/2] one', flush=True)\ntime.sleep(60)"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(script, tmp_path / "log", interrupt)
    os.close(held)
    assert select.select([seen], [], [], 20)[0], "the child lives on"
    assert os.read(seen, 1) == b"", "nobody holds it any more"
    os.close(seen)
    assert [each.poll() for each in started] == [-how]
    assert not (tmp_path / "log").exists()
    process.end(started[0])  # once more does no harm
