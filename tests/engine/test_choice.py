"""Engines that replace stock: none that lacks a backend, is damaged, or is writable by another user."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamahybrid.engine import activation, bindings, choice, installed, libraries, sdist
from llamahybrid.engine.choice import InstalledBindings
from llamahybrid.errors import EngineError
from tests.engine.conftest import Build, Wheel, mismatch


@pytest.mark.parametrize("backend", ["cuda", "hip", "vulkan", "metal", "sycl", "opencl", "blas", "rpc"])
def test_engine_without_the_wheels_backend_is_not_used(built: Build, wheel_with: Wheel, backend: str) -> None:
    wheel_with("cpu", backend)
    engine = built()
    assert activation.resolve("") is None
    assert f"has {backend} and this has not" in mismatch(engine)
    assert f'CMAKE_ARGS="-DGGML_{backend.upper()}=on" llamahybrid engine build' in mismatch(engine)
    with pytest.raises(EngineError, match="engine list"):
        activation.resolve("patched")
    assert activation.resolve(str(engine.libraries)) == engine.libraries, "the user's own word counts"


def test_latest_engine_with_the_wheels_backends_is_used(built: Build, wheel_with: Wheel) -> None:
    wheel_with("cpu", "cuda")
    built("older", ("cpu", "cuda"), built="2025-01-01")
    engine = built("cuda", ("cpu", "cuda"), built="2025-02-02")
    built("newer", built="2026-02-02")
    assert activation.resolve("") == engine.libraries


@pytest.mark.parametrize(
    ("version", "fits"),
    [("{}", True), ("{}+cu124", True), ("{}.post1", False), ("{}1", False), ("0.0.1+cu124", False)],
)
def test_local_version_label_is_ignored(built: Build, version: str, fits: bool) -> None:
    site = replace(InstalledBindings.here(), version=version.format(bindings.version()))
    assert (choice.mismatch(built(), site) == "") is fits


@pytest.mark.parametrize("place", ["lib/libllama.so", "lib", ".", "..", "manifest.json"])
def test_untrusted_engine_is_not_used(built: Build, place: str) -> None:
    engine = built()
    assert mismatch(engine) == ""
    (engine.folder / place).chmod(0o777)
    assert "somebody else could have written it" in mismatch(engine)
    assert activation.resolve("") is None


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda file: os.truncate(file, 1), "1 bytes, not 3"),
        (lambda file: file.write_bytes(b"123"), "content has changed"),
        (lambda file: file.unlink(), "cannot be read"),
    ],
)
def test_damaged_engine_is_not_used(built: Build, harm: Callable[[Path], None], said: str) -> None:
    engine = built()
    library = engine.libraries / "libggml-cpu.so"
    library.write_bytes(b"abc")
    engine = replace(engine, files=installed.contents(engine.libraries))
    engine.write()
    assert installed.engines() == [engine]
    assert mismatch(engine) == ""
    harm(library)
    assert said in mismatch(engine)
    assert activation.resolve("") is None


def test_build_warning_predicts_an_unused_engine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = InstalledBindings(sdist.PIN.version, frozenset({"cpu"}))
    assert choice.build_warning(here) == ""
    assert choice.build_warning(replace(here, version=f"{here.version}+cu124")) == ""
    assert "installed is 9.9" in choice.build_warning(replace(here, version="9.9"))
    assert "installed is none" in choice.build_warning(replace(here, version=None))
    assert choice.build_warning(replace(here, backends=frozenset({"cpu", "rpc"}))) == "", "engines have RPC"
    gpu = replace(here, backends=frozenset({"cpu", "cuda"}))
    assert 'CMAKE_ARGS="-DGGML_CUDA=on"' in choice.build_warning(gpu)
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert choice.build_warning(gpu) == ""
    monkeypatch.setattr(choice.sys, "platform", "darwin")
    assert choice.build_warning(replace(here, backends=frozenset({"cpu", "metal", "blas"}))) == ""


@pytest.mark.parametrize("folder", ["llama_cpp_python.libs", "llama_cpp/.dylibs"])
def test_portable_wheel_has_its_libraries_in_another_folder(wheel_with: Wheel, folder: str) -> None:
    lib = wheel_with("cpu")
    assert libraries.backends(lib) == {"cpu"}
    copies = lib.parents[1] / folder
    copies.mkdir()
    for name in ("ggml-base-0a1b2c3d", "ggml-cpu-0a1b2c3d", "ggml-cuda-0a1b2c3d"):
        (copies / f"lib{name}.so.0.25.3").touch()
    assert libraries.backends(lib) == {"cpu", "cuda"}
