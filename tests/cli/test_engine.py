"""`llamahybrid engine`: what it says, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.engine import patched
from llamahybrid.errors import EngineError
from tests.engine.conftest import Build, Wheel

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [(EngineError("no compiler"), 1, "error: no compiler"), (KeyboardInterrupt(), 130, "nothing was kept")],
)
def test_failed_build_is_one_error_line(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise end

    monkeypatch.setattr(patched, "make", fail)
    result = CliRunner().invoke(app, ["engine", "build"])
    assert result.exit_code == code
    assert said in result.output
    assert "Traceback" not in result.output


def test_list_marks_the_used_engine_and_explains_the_others(built: Build) -> None:
    assert "`llamahybrid engine build` makes" in CliRunner().invoke(app, ["engine", "list"]).output
    other = built("1", version="0.3.0")
    assert f"  {other.libraries}" in CliRunner().invoke(app, ["engine", "list"]).output
    engine = built("2")
    said = CliRunner().invoke(app, ["engine", "list"]).output
    assert f"* {engine.libraries}" in said
    assert said.count("not taken by itself") == 1
    (engine.folder / "manifest.json").write_text("{")
    said = " ".join(CliRunner().invoke(app, ["engine", "list"]).output.split())
    assert "no manifest that can be read" in said
    assert "remove the folder" in said


def test_build_explains_an_unused_engine(
    built: Build, monkeypatch: pytest.MonkeyPatch, wheel_with: Wheel
) -> None:
    engine = built()
    monkeypatch.setattr(patched, "make", lambda *_, **__: engine)
    assert "does not take it" not in CliRunner().invoke(app, ["engine", "build"]).output
    wheel_with("cpu", "cuda")
    result = CliRunner().invoke(app, ["engine", "build"])
    assert "does not take it by itself: the installed llama-cpp-python has cuda" in result.output
    assert "note: the installed llama-cpp-python has cuda, which no option asks for" in result.output
    assert result.output.splitlines()[-1] == str(engine.libraries)


def test_build_prints_a_name_that_is_no_text_as_its_bytes(
    built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `lib=$(llamahybrid engine build)` needs it."""
    engine = replace(built(), folder=Path("/caf\udce9"))
    monkeypatch.setattr(patched, "make", lambda *_, **__: engine)
    assert CliRunner().invoke(app, ["engine", "build"]).stdout_bytes == b"/caf\xe9/lib\n"


def test_doctor_reports_the_shim_with_advice() -> None:
    result = CliRunner().invoke(app, ["engine", "doctor"])
    assert result.exit_code == 0, result.output
    topics = [line[:20].strip() for line in result.output.splitlines()]
    assert topics[:2] == ["llama-cpp-python", "engine"]
    assert "llama_n_rs_seq: yes" in result.output
    assert "native shim         present" in result.output
    assert "patched engine      none was built\n                    -> optional: " in result.output
