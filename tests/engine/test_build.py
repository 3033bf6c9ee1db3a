"""A build by pip: its options, its steps, and what a failed one leaves."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.engine import patched
from llamahybrid.engine.process import Progress
from llamahybrid.engine.recipe import CMAKE_ARGS
from llamahybrid.errors import EngineError

BUILDS = """
import pathlib, sys
sys.stdout.buffer.write(b"no \\xff text\\n")
print("  [1/2] one", flush=True)
print("  [2/2] two", flush=True)
out = pathlib.Path(sys.argv[1])
out.mkdir()
(out / "llama_cpp_python-9.9.9-py3-none-any.whl").write_text("wheel")
"""


def pip_that(monkeypatch: pytest.MonkeyPatch, script: str) -> list[subprocess.Popen[str]]:
    """Replace `pip wheel` by a short Python script; its argument is the wheel folder."""
    start, started = subprocess.Popen, []

    def popen(command: list[str], **options: object) -> subprocess.Popen[str]:
        out = command[command.index("--wheel-dir") + 1]
        started.append(start([sys.executable, "-c", script, out], **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def run(folder: Path, progress: Progress = lambda *step: None) -> None:
    (folder / "a").mkdir()
    patched.build_wheel(folder, folder / "a" / "out", progress, folder / "log")


def test_progress_follows_the_steps_of_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, BUILDS)
    steps: list[tuple[str, int, int]] = []
    run(tmp_path, lambda *step: steps.append(step))
    assert steps == [("one", 1, 2), ("two", 2, 2)]
    assert len(list(tmp_path.rglob("*.whl"))) == 1
    assert not (tmp_path / "log").exists()


def test_failed_build_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's CMAKE_ARGS are last, and override; temporary files are removed with the build."""
    script = (
        "import os, sys; print('no compiler', os.environ['TMPDIR'], os.environ['CMAKE_ARGS']); sys.exit(1)"
    )
    pip_that(monkeypatch, script)
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_RPC=off")
    with pytest.raises(EngineError, match="no compiler") as caught:
        run(tmp_path)
    assert str(tmp_path / "log") in str(caught.value)
    log = (tmp_path / "log").read_text().strip()
    assert log == f"no compiler {tmp_path / 'a' / 'tmp'} {CMAKE_ARGS} -DGGML_RPC=off"
    assert "-DGGML_RPC=ON" in CMAKE_ARGS


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (BUILDS + "sys.exit(3)", "did not build"),
        ("print('fatal error: x.o: No space left on device'); raise SystemExit(1)", "the disk is full"),
    ],
)
def test_build_succeeds_with_status_0_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    pip_that(monkeypatch, script)
    with pytest.raises(EngineError, match=said):
        run(tmp_path)


def test_interrupted_build_ends_its_children_and_leaves_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build and its child hold a pipe open, which is closed when both are gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fork = f"import os, signal; pipe = open({str(pipe)!r}, 'w'); os.fork() or signal.pause()"
    started = pip_that(monkeypatch, f"{fork}\n{BUILDS}\nsignal.pause()")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupt)
    assert not (tmp_path / "log").exists()
    assert [process.poll() for process in started] == [-signal.SIGTERM]
    assert select.select([held], [], [], 60)[0], "the child lives on"
    assert os.read(held, 1) == b""
    os.close(held)
