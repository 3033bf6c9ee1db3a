"""Importing is cheap and goes only as far as it must."""

from __future__ import annotations

import subprocess
import sys

import pytest

import llamahybrid


def loaded_after(code: str) -> set[str]:
    """Names of the modules a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_package_alone_loads_neither_the_engine_nor_numpy() -> None:
    assert not {"llama_cpp", "numpy", "typer"} & loaded_after("import llamahybrid")


def test_building_the_engine_needs_platformdirs_and_rich_only() -> None:
    loaded = loaded_after("import llamahybrid.engine.__main__")
    assert not {"llama_cpp", "numpy", "cffi", "xxhash", "typer", "diskcache"} & loaded


def test_the_shim_is_bound_only_when_asked_for() -> None:
    assert "llama_cpp" not in loaded_after("import llamahybrid.capi.shim")


def test_the_prompt_cache_stands_apart() -> None:
    every = (
        "import importlib, pkgutil, llamahybrid.prompt_cache as room\n"
        "for module in pkgutil.iter_modules(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )
    loaded = loaded_after(every)
    ours = {name for name in loaded if name.startswith("llamahybrid.")}
    assert len(ours) > 20
    outside = {n for n in ours if not n.startswith(("llamahybrid.prompt_cache", "llamahybrid.engine"))}
    assert outside == {"llamahybrid.errors"}  # and the engine's choice, which the package itself makes
    assert not [name for name in loaded if name.startswith("llama_cpp")]


@pytest.mark.parametrize("name", llamahybrid.__all__)
def test_everything_exported_is_there(name: str) -> None:
    assert getattr(llamahybrid, name) is not None
    assert name in dir(llamahybrid)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        llamahybrid.nonsense  # noqa: B018
