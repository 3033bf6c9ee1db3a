"""CMake options of CUDA builds: incomplete toolkits, no GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid.engine import cuda
from llamahybrid.errors import EngineError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="folders as they are on Linux")

Make = Callable[..., Path]


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """`toolkit("include/cublas_v2.h", ...)`: a toolkit at CUDA_PATH with additional files."""
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUDACXX", "CUDA_HOME", "CUDAToolkit_ROOT", "CUDAARCHS", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda, "present_architecture", lambda: "")

    def make(*files: str, release: str = "13.0") -> Path:
        root = tmp_path / "cuda"
        said = f"Cuda compilation tools, release {release}, V{release}.88"
        put(root / "bin" / "nvcc", f"#!/bin/sh\necho {said!r}\n")
        for file in ("include/cuda_runtime.h", "lib64/libcudart.so.13", "nvvm/bin/cicc", *files):
            put(root / file)
        monkeypatch.setenv("CUDA_PATH", str(root))
        return root

    return make


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed nvidia-cublas."""
    folder = tmp_path / "site" / "nvidia" / "cu13"
    put(folder / "include" / "cublas_v2.h")
    put(folder / "lib" / "libcublas.so.13")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


WHOLE = ("include/cublas_v2.h", "lib64/libcublas.so", "lib64/stubs/libcuda.so")


def test_complete_toolkit_is_used_directly(toolkit: Make) -> None:
    root = toolkit(*WHOLE)
    said = cuda.cmake_args("90")
    assert "-DGGML_CUDA=on" in said
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in said
    assert f"-DCUDAToolkit_ROOT={root} " in said + " "
    assert "NO_VMM" not in said
    assert "CUDA_FLAGS" not in said


def test_cublas_of_a_python_package_completes_the_toolkit(toolkit: Make, package: Path) -> None:
    root = toolkit()
    said = cuda.cmake_args("90").split()
    assert f"-DCUDAToolkit_ROOT={root}" in said
    assert f"-DCMAKE_CUDA_COMPILER={root / 'bin' / 'nvcc'}" in said
    for name in ("cublas", "cublasLt"):
        assert f"-DCUDA_{name}_LIBRARY={package / 'lib' / f'lib{name}.so.13'}" in said
    assert f"-DCMAKE_CUDA_FLAGS=-isystem={package / 'include'}" in said
    assert "-DGGML_CUDA_NO_VMM=on" in said, "there is nothing of the driver to link with"


def test_script_on_the_path_that_starts_nvcc_leads_to_its_toolkit(
    toolkit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers whose nvcc is `exec /usr/local/cuda-13.0/bin/nvcc "$@"`."""
    root = toolkit()
    real = put(root / "bin" / "nvcc", f"#!/bin/sh\necho '#$ TOP={root}/bin/..' >&2\necho release 13.0,\n")
    script = put(tmp_path / "local" / "bin" / "nvcc", f'#!/bin/sh\nexec {real} "$@"\n')
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    assert cuda.Toolkit.find().root == root

    put(real, "#!/bin/sh\necho release 13.0,\n")  # names no toolkit
    monkeypatch.setattr(cuda, "_USUAL", root)
    assert cuda.Toolkit.find().root == root, "a folder without headers is no toolkit; the usual one is"


def test_missing_cublas_error_names_the_package(toolkit: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.site, "getsitepackages", list)
    monkeypatch.setattr(sys, "path", [])
    toolkit()
    with pytest.raises(EngineError, match=r"pip install 'nvidia-cublas==13\.0\.\*'"):
        cuda.cmake_args("90")
    toolkit(release="12.4")
    with pytest.raises(EngineError, match=r"nvidia-cublas-cu12==12\.4"):
        cuda.cmake_args("90")


def test_missing_toolkit_or_architecture_is_an_error(toolkit: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit(*WHOLE)
    with pytest.raises(EngineError, match="--cuda-arch 90"):
        cuda.cmake_args()
    monkeypatch.setattr(cuda, "present_architecture", lambda: "89")
    assert "-DCMAKE_CUDA_ARCHITECTURES=89" in cuda.cmake_args()
    monkeypatch.setenv("CUDAARCHS", "80")
    assert "-DCMAKE_CUDA_ARCHITECTURES=80" in cuda.cmake_args()
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cuda, "_USUAL", Path("/nowhere"))
    with pytest.raises(EngineError, match="CUDA_PATH"):
        cuda.cmake_args("90")


def test_architectures_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "nvidia-smi", "#!/bin/sh\nprintf '9.0\\n8.9\\n9.0\\n'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cuda.present_architecture() == "89;90"
    monkeypatch.setenv("PATH", "")
    assert cuda.present_architecture() == ""
