"""Which backends a folder of libraries has, told from its files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamahybrid.engine import backends
from tests.engine.compiled import shared
from tests.engine.conftest import Wheel


def test_the_variants_of_the_cpu_backend_are_one(wheel_with: Wheel) -> None:
    assert backends.of(wheel_with("cpu-haswell", "cpu-zen4")) == {"cpu"}


@pytest.mark.parametrize("folder", ["llama_cpp_python.libs", "llama_cpp/.dylibs"])
def test_a_wheel_made_portable_has_its_libraries_beside_it(wheel_with: Wheel, folder: str) -> None:
    lib = wheel_with("cpu")
    assert backends.of(lib) == {"cpu"}
    copies = lib.parents[1] / folder
    copies.mkdir()
    for name in ("ggml-base-0a1b2c3d", "ggml-cpu-0a1b2c3d", "ggml-cuda-0a1b2c3d"):
        (copies / f"lib{name}.so.0.25.3").touch()
    assert backends.of(lib) == {"cpu", "cuda"}


def test_they_cannot_be_told_where_no_file_says(wheel_with: Wheel) -> None:
    folder = wheel_with()
    assert backends.of(folder) is None
    assert backends.of(None) is None
    assert backends.of(folder / "nowhere") is None


def test_a_library_in_one_piece_is_known_by_its_symbols(tmp_path: Path) -> None:
    source = "void ggml_backend_cpu_reg(void){} void ggml_backend_vk_reg(void){}"
    library = shared(tmp_path / "lib" / "libllama.so", source)
    assert backends.of(library.parent) == {"cpu", "vulkan"}


def test_the_command_that_builds_them_leaves_out_what_is_always_there() -> None:
    assert backends.how_to_build({"cpu"}) == "`llamahybrid engine build`"
    said = backends.how_to_build({"vulkan", "cpu", "cuda"})
    assert said == '`CMAKE_ARGS="-DGGML_CUDA=on -DGGML_VULKAN=on" llamahybrid engine build`'
