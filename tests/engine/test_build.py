"""The stock wheel: built once for each set of options, atomically."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from llamahybrid.engine import build, sdist
from llamahybrid.errors import EngineError
from tests.engine.fake_pip import BUILDS, Index, litter, pip_that


def test_the_wheel_is_built_once_for_each_set_of_options(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, BUILDS)
    steps: list[tuple[int, int, str]] = []
    plain = build.wheel(lambda *step: steps.append(step))
    assert plain.read_text() == "wheel"
    assert steps == [(1, 2, "one"), (2, 2, "two")]
    assert build.wheel(lambda *step: steps.append(step)) == plain
    assert len(steps) == 2
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert build.wheel(lambda *step: None) != plain
    assert not litter(sdist.cache_dir())
    assert not list(sdist.cache_dir().rglob("*.log"))


def test_failed_build_names_its_log_and_leaves_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, "import os, sys; print('no compiler', os.environ['TMPDIR']); sys.exit(1)")
    with pytest.raises(EngineError, match="no compiler") as caught:
        build.wheel(lambda *step: None)
    (log,) = (sdist.cache_dir() / "wheels").iterdir()
    assert str(log) in str(caught.value)
    said, temporary = log.read_text().strip().rsplit(maxsplit=1)
    assert said == "no compiler"
    assert sdist.cache_dir() in Path(temporary).parents, "what it leaves behind would stay"


def test_environment_overrides_cmake_args(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "import os; print(os.environ['CMAKE_ARGS'])"
    pip_that(monkeypatch, said)
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_RPC=off")
    (tmp_path / "a").mkdir()
    log = tmp_path / "log"
    with pytest.raises(EngineError):
        build.run(tmp_path, tmp_path / "a" / "out", lambda *step: None, log, "-DGGML_RPC=ON")
    assert log.read_text().strip() == "-DGGML_RPC=ON -DGGML_RPC=off"


@pytest.mark.parametrize("script", ["", BUILDS + "sys.exit(3)"])
def test_build_succeeds_with_a_wheel_and_status_0_only(
    index: Index, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    pip_that(monkeypatch, script)
    with pytest.raises(EngineError, match="did not build"):
        build.wheel(lambda *step: None)
    assert not list(sdist.cache_dir().rglob("*.whl"))


def test_interrupted_build_ends_its_children_and_leaves_no_wheel(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
        build.wheel(interrupt)
    assert not list((sdist.cache_dir() / "wheels").iterdir()), "no log either"
    assert [process.poll() for process in started] == [-signal.SIGTERM]
    assert select.select([held], [], [], 60)[0], "the child lives on"
    assert os.read(held, 1) == b""
    os.close(held)


def test_full_disk_is_named(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, "print('fatal error: x.o: No space left on device'); raise SystemExit(1)")
    with pytest.raises(EngineError, match="the disk is full"):
        build.wheel(lambda *step: None)


def test_wheel_that_others_can_write_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, BUILDS)
    wheel = build.wheel(lambda *step: None)
    wheel.chmod(0o666)
    with pytest.raises(EngineError, match="can be written by others"):
        build.wheel(lambda *step: None)
