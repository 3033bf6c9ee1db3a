"""The doctor: the loaded engine, missing parts, and advice."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

import pytest

from llamahybrid.capi import shim as native
from llamahybrid.engine import bindings, doctor
from llamahybrid.errors import EngineError
from tests.engine.conftest import Build, Wheel

Load: TypeAlias = Callable[[], Collection[str]]

pytestmark = pytest.mark.usefixtures("cache")


def load() -> Collection[str]:
    return native.library().optional


def found(topic: str, load: Load = load, shim: bool = True) -> doctor.Finding:
    return next(finding for finding in doctor.examine(load, shim, list) if finding.topic == topic)


def test_doctor_inspects_files_that_cannot_be_loaded(
    built: Build, monkeypatch: pytest.MonkeyPatch, wheel_with: Wheel
) -> None:
    def fail() -> Collection[str]:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    folder = wheel_with("cpu", "cuda")
    monkeypatch.setattr(bindings, "loaded_from", lambda: None)
    built("1", ("cpu", "cuda"))
    assert "libcuda.so.1" in found("engine", fail).text
    assert "driver" in found("engine", fail).advice

    def fail_without_toolkit() -> Collection[str]:
        raise RuntimeError("libcublas.so.13: cannot open shared object file")

    assert "LD_LIBRARY_PATH" in found("engine", fail_without_toolkit).advice
    assert found("backends", fail).text == "cpu, cuda; not loaded"
    (folder / "libggml-cpu.so").unlink()
    assert found("backends", fail).text.startswith("cannot be told")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("LLAMAHYBRID_ENGINE=/gone has no libllama", "unset LLAMAHYBRID_ENGINE"),
        ("libllama is damaged", "install llama-cpp-python again"),
    ],
)
def test_advice_for_an_engine_that_was_set_names_its_variable(error: str, advice: str) -> None:
    def fail() -> Collection[str]:
        raise EngineError(error)

    assert found("engine", fail).advice.startswith(advice)


@pytest.mark.parametrize(
    ("version", "old"), [("0.3.4", True), ("0.3.36+cu124", False), ("0.3.9+cu124", True), ("0.4.0", False)]
)
def test_doctor_detects_an_old_llama_cpp_python(
    monkeypatch: pytest.MonkeyPatch, version: str, old: bool
) -> None:
    monkeypatch.setattr(bindings, "version", lambda: version)
    assert ("too old" in found("llama-cpp-python").advice) is old


@pytest.mark.parametrize(("version", "advice"), [(None, ""), ("0.3.0", "engine build")])
def test_doctor_detects_the_loaded_patched_engine(
    built: Build, monkeypatch: pytest.MonkeyPatch, version: str | None, advice: str
) -> None:
    engine = built("1", version=version or str(bindings.version()))
    monkeypatch.setattr(bindings, "loaded_from", lambda: engine.libraries.resolve())
    assert found("engine").text.startswith("patched")
    assert advice in found("engine").advice
    assert (found("engine").advice == "") is (advice == "")
    assert (found("patched engine").text == "in use") is (advice == "")
    assert found("libmtmd").text.startswith("from another build")
    (engine.libraries / "libllama.so").write_text("damage")
    assert "engine build" in found("engine").advice


def test_doctor_names_gpus_and_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cpu", "cuda", "vulkan", "rpc"):
        (tmp_path / f"libggml-{name}.so").touch()
    monkeypatch.setattr(bindings, "loaded_from", lambda: tmp_path)
    findings = {f.topic: f for f in doctor.examine(load, True, lambda: ["CUDA0: a GPU"])}
    assert findings["backends"].text == "cpu, cuda, rpc, vulkan; CUDA0: a GPU"
    assert findings["not verified"].text == "cuda, vulkan"
    assert found("backends").text == "cpu, cuda, rpc, vulkan; no GPU in use"


def test_doctor_reports_missing_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("native shim", shim=False).text.startswith("missing")
    assert found("native shim").text == "present"
    monkeypatch.setattr(bindings, "version", lambda: None)
    (only,) = doctor.examine(load, True, list)
    assert only.text == "not installed"
