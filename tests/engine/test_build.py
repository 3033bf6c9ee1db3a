"""The stock wheel: built once for each set of options, whole or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from llamahybrid.engine import build, sdist
from llamahybrid.engine.recipe import Recipe
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


def test_a_failed_build_names_its_log_and_leaves_nothing(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, "import os, sys; print('no compiler', os.environ['TMPDIR']); sys.exit(1)")
    with pytest.raises(EngineError, match="no compiler") as caught:
        build.wheel(lambda *step: None)
    (log,) = (sdist.cache_dir() / "wheels").iterdir()
    assert str(log) in str(caught.value)
    said, temporary = log.read_text().strip().rsplit(maxsplit=1)
    assert said == "no compiler"
    assert sdist.cache_dir() in Path(temporary).parents, "what it leaves behind would stay"


def test_cmake_hears_the_environment_last(
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
def test_success_takes_both_a_wheel_and_a_clean_exit(
    index: Index, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    pip_that(monkeypatch, script)
    with pytest.raises(EngineError, match="did not build"):
        build.wheel(lambda *step: None)
    assert not list(sdist.cache_dir().rglob("*.whl"))


def test_whoever_finishes_the_same_build_second_takes_the_firsts(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = sdist.cache_dir() / "wheels" / Recipe.here().key

    def first(*_: object) -> None:
        home.mkdir(exist_ok=True)
        (home / "first.whl").touch()

    pip_that(monkeypatch, BUILDS)
    assert build.wheel(first) == home / "first.whl"


def test_a_wheel_that_cannot_be_put_in_its_place_is_an_error(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    sdist.fetch()
    pip_that(monkeypatch, BUILDS)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EngineError, match="disk full"):
        build.wheel(lambda *step: None)


def test_an_interrupted_build_is_ended_and_leaves_no_wheel(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pip_that(monkeypatch, BUILDS + "import time; time.sleep(60)")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.wheel(interrupt)
    assert not list((sdist.cache_dir() / "wheels").iterdir()), "no log either"
    assert [process.poll() for process in started] == [-signal.SIGTERM]


def test_where_the_log_cannot_be_written_nothing_is_started(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pip_that(monkeypatch, BUILDS)
    (sdist.cache_dir() / "wheels" / f"{Recipe.here().key}.log").mkdir(parents=True)
    with pytest.raises(EngineError, match="LLAMAHYBRID_CACHE_DIR"):
        build.wheel(lambda *step: None)
    assert not started


def test_a_wheel_that_others_can_write_is_not_installed(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, BUILDS)
    wheel = build.wheel(lambda *step: None)
    wheel.chmod(0o666)
    with pytest.raises(EngineError, match="can be written by others"):
        build.wheel(lambda *step: None)


def test_a_folder_without_its_wheel_is_built_anew(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, BUILDS)
    build.wheel(lambda *step: None).unlink()
    assert build.wheel(lambda *step: None).read_text() == "wheel"
