"""`llamahybrid engine`: what it says, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid.cli import app
from llamahybrid.engine import activation, doctor, installed, patched, series
from llamahybrid.engine.build import Recipe
from llamahybrid.engine.installed import Engine
from llamahybrid.errors import EngineError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))


def build(name: str, **changes: object) -> Engine:
    facts = {"version": str(activation.version()), "recipe": Recipe.here(), "patches": series.patches()}
    engine = Engine(installed.home() / name, **facts, source="", symbols=(), built=name, seconds=1.0)  # type: ignore[arg-type]
    engine = replace(engine, **changes)  # type: ignore[arg-type]
    engine.libraries.mkdir(parents=True)
    for library in ("llama", "mtmd"):
        (engine.libraries / f"lib{library}{installed._SUFFIXES[0]}").touch()
    engine.write()
    return engine


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [(EngineError("no compiler"), 1, "error: no compiler"), (KeyboardInterrupt(), 130, "nothing was kept")],
)
def test_a_build_that_ends_early_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise end

    monkeypatch.setattr(patched, "make", fail)
    result = CliRunner().invoke(app, ["engine", "build"])
    assert result.exit_code == code
    assert said in result.output
    assert "Traceback" not in result.output


def test_the_list_marks_the_one_that_is_taken_and_says_why_others_are_not() -> None:
    assert "`llamahybrid engine build` makes" in CliRunner().invoke(app, ["engine", "list"]).output
    other = build("1", version="0.3.0")
    assert f"  {other.libraries}" in CliRunner().invoke(app, ["engine", "list"]).output
    engine = build("2")
    said = CliRunner().invoke(app, ["engine", "list"]).output
    assert f"* {engine.libraries}" in said
    assert said.count("not taken by itself") == 1


def found(topic: str) -> doctor.Finding:
    return next(finding for finding in doctor.examine() if finding.topic == topic)


def test_the_doctor_finds_a_stock_engine_and_what_could_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "stock", activation.loaded_from)
    assert found("engine").text.startswith("stock")
    assert found("libmtmd").text == "from the same build"
    assert found("patched engine").text == "none was built"
    build("1", version="0.3.0")
    assert "made for llama-cpp-python 0.3.0" in found("patched engine").text
    build("2")
    assert found("patched engine").text == "built, not in use"
    monkeypatch.setattr(activation, "stock", lambda: None)
    assert found("engine").text.startswith("another's")


@pytest.mark.parametrize(("version", "advice"), [(None, ""), ("0.3.0", "engine build")])
def test_the_doctor_knows_the_patched_engine_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch, version: str | None, advice: str
) -> None:
    engine = build("1", version=version or str(activation.version()))
    monkeypatch.setattr(activation, "loaded_from", lambda: engine.libraries.resolve())
    assert found("engine").text.startswith("patched")
    assert advice in found("engine").advice
    assert (found("engine").advice == "") is (advice == "")
    assert (found("patched engine").text == "in use") is (advice == "")
    assert found("libmtmd").text.startswith("from another build")


def test_the_doctor_says_what_is_missing_and_what_was_never_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("libggml-base.so", "libggml-cpu.so", "libggml-cuda.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(activation, "loaded_from", lambda: tmp_path)
    monkeypatch.setattr(doctor.native, "available", False)
    assert found("native shim").text.startswith("missing")
    assert found("backends").text.startswith("cpu, cuda")
    assert found("CUDA").text == "CUDA: built, not verified"
    assert "Cpu" not in [finding.topic for finding in doctor.examine()]
    monkeypatch.setattr(activation, "version", lambda: None)
    (only,) = doctor.examine()
    assert only.text == "not installed"
