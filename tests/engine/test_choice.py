"""Which engine takes stock's place: never one that takes a backend away, that another user could have
written, or that is damaged."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.engine import activation, backends, choice, installed, sdist, trust
from llamahybrid.engine.choice import Site
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.recipe import Recipe
from llamahybrid.errors import EngineError

Build = Callable[..., Engine]
Wheel = Callable[..., Path]


def mismatch(engine: Engine) -> str:
    return choice.mismatch(engine, Site.here())


@pytest.mark.parametrize("backend", ["cuda", "hip", "vulkan", "metal", "sycl", "opencl", "blas", "rpc"])
def test_no_backend_of_the_installed_wheel_is_taken_away(
    built: Build, wheel_with: Wheel, backend: str
) -> None:
    wheel_with("cpu", backend)
    engine = built()
    assert activation.wanted("") is None
    assert f"has {backend} and this has not" in mismatch(engine)
    assert f'CMAKE_ARGS="-DGGML_{backend.upper()}=on" llamahybrid engine build' in mismatch(engine)
    with pytest.raises(EngineError, match="engine list"):
        activation.wanted("patched")
    assert activation.wanted(str(engine.libraries)) == engine.libraries, "the user's own word counts"
    said = CliRunner().invoke(app, ["engine", "list"]).output
    assert f"  {engine.libraries}" in said
    assert "this has not" in said


def test_an_engine_with_the_wheels_backends_is_taken(built: Build, wheel_with: Wheel) -> None:
    wheel_with("cpu", "cuda")
    engine = built("cuda", ("cpu", "cuda"))
    assert activation.wanted("") == engine.libraries


def test_a_newer_build_does_not_win_where_an_older_one_fits_better(
    built: Build, wheel_with: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = wheel_with("cpu", "cuda")
    cuda = built("cuda", ("cpu", "cuda"), built="2025-01-01")
    cpu = built("cpu", built="2026-02-02")
    assert activation.wanted("") == cuda.libraries
    (folder / f"libggml-cuda{installed._SUFFIXES[0]}").unlink()
    assert choice.fitting() == [cuda, cpu], "who built more wanted more"
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=off")
    asked = built("asked", built="2025-01-01", recipe=Recipe.here())
    assert activation.wanted("") == asked.libraries, "the options of the environment"


def test_the_variants_of_the_cpu_backend_are_one(built: Build, wheel_with: Wheel) -> None:
    wheel_with("cpu-haswell", "cpu-zen4")
    assert mismatch(built()) == ""


@pytest.mark.parametrize("folder", ["llama_cpp_python.libs", "llama_cpp/.dylibs"])
def test_a_wheel_made_portable_has_its_libraries_beside_it(
    built: Build, wheel_with: Wheel, folder: str
) -> None:
    lib = wheel_with("cpu")
    assert mismatch(built()) == ""
    copies = lib.parents[1] / folder
    copies.mkdir()
    for name in ("ggml-base-0a1b2c3d", "ggml-cpu-0a1b2c3d", "ggml-cuda-0a1b2c3d"):
        (copies / f"lib{name}.so.0.25.3").touch()
    assert backends.of(lib) == {"cpu", "cuda"}
    assert "has cuda and this has not" in mismatch(built("two"))


def test_backends_that_cannot_be_told_are_not_taken_away(built: Build, wheel_with: Wheel) -> None:
    folder = wheel_with()
    assert backends.of(folder) is None
    assert "cannot be told" in mismatch(built())
    assert backends.of(None) is None
    assert backends.of(folder / "nowhere") is None


def test_a_wheel_in_one_piece_is_known_by_its_symbols(
    built: Build, wheel_with: Wheel, tmp_path: Path
) -> None:
    library = wheel_with() / "libllama.so"
    (tmp_path / "x.c").write_text("void ggml_backend_cpu_reg(void){} void ggml_backend_vk_reg(void){}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "x.c"], check=True)
    assert backends.of(library.parent) == {"cpu", "vulkan"}
    assert "has vulkan and this has not" in mismatch(built())


@pytest.mark.parametrize(
    ("version", "fits"),
    [("{}", True), ("{}+cu124", True), ("{}.post1", False), ("{}1", False), ("0.0.1+cu124", False)],
)
def test_a_local_label_is_no_other_version(built: Build, version: str, fits: bool) -> None:
    site = replace(Site.here(), version=version.format(activation.version()))
    assert (choice.mismatch(built(), site) == "") is fits


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("place", ["lib/libllama.so", "lib", "manifest.json", "", ".."])
def test_what_another_user_wrote_is_not_loaded(
    built: Build, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine = built()
    assert mismatch(engine) == ""
    make_foreign(engine.folder / place, monkeypatch)
    assert "belongs to another user" in mismatch(engine)
    assert activation.wanted("") is None


@pytest.mark.parametrize("place", ["lib/libllama.so", "lib", "manifest.json", "", ".."])
def test_what_others_can_write_is_not_loaded(
    built: Build, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine = built()
    path = engine.folder / place
    mode = path.stat().st_mode
    path.chmod(mode | 0o002)
    assert "written by others" in mismatch(engine)
    path.chmod(mode | 0o020)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_gid=path.stat().st_gid, pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="staff", gr_mem=[]))
    assert "written by its group" in mismatch(engine)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=["you"]))
    assert "written by its group" in mismatch(engine)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=[]))
    assert mismatch(engine) == "", "a group of one's own"


def test_a_link_is_followed_and_home_is_where_looking_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "open" / "home" / "lib"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "open").chmod(0o777)
    assert "open can be written by others" in trust.untrusted(tmp_path / "link")
    monkeypatch.setenv("HOME", str(tmp_path / "open" / "home"))
    assert trust.untrusted(real) == ""
    monkeypatch.setenv("HOME", "/")
    (tmp_path / "open").chmod(0o1777)
    assert trust.untrusted(real) == "", "as in /tmp, others cannot move what is there"
    assert "cannot be looked at" in trust.untrusted(real / "gone")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda file: os.truncate(file, 1), "1 bytes, not 3"),
        (lambda file: file.write_bytes(b"123"), "content has changed"),
        (lambda file: file.unlink(), "cannot be read"),
    ],
)
def test_a_damaged_engine_is_not_taken(built: Build, harm: Callable[[Path], None], said: str) -> None:
    engine = built()
    library = engine.libraries / "libggml-cpu.so"
    library.write_bytes(b"abc")
    engine = replace(engine, files=installed.contents(engine.libraries))
    engine.write()
    assert installed.engines() == [engine]
    assert mismatch(engine) == ""
    harm(library)
    assert said in mismatch(engine)
    assert activation.wanted("") is None


def test_a_large_library_is_read_only_when_there_is_time(
    built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built()
    (engine.libraries / "libllama.so").write_bytes(b"abc")
    engine = replace(engine, files=installed.contents(engine.libraries))
    (engine.libraries / "libllama.so").write_bytes(b"123")
    monkeypatch.setattr(installed, "_QUICK", 2)
    assert engine.damage() == ""
    assert "content has changed" in engine.damage(thorough=True)


def test_a_build_that_will_not_be_taken_is_known_beforehand(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Site(sdist.PIN.version, frozenset({"cpu"}))
    assert choice.forecast(here) == ""
    assert choice.forecast(replace(here, version=f"{here.version}+cu124")) == ""
    assert "installed is 9.9" in choice.forecast(replace(here, version="9.9"))
    assert "installed is none" in choice.forecast(replace(here, version=None))
    gpu = replace(here, backends=frozenset({"cpu", "cuda"}))
    assert 'CMAKE_ARGS="-DGGML_CUDA=on"' in choice.forecast(gpu)
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert choice.forecast(gpu) == ""
    monkeypatch.setattr(choice.sys, "platform", "darwin")
    assert choice.forecast(replace(here, backends=frozenset({"cpu", "metal", "blas"}))) == ""
