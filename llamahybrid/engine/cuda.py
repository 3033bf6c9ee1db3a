"""CMake options for a CUDA build: a toolkit with cuBLAS, and an architecture.

A toolkit from a package manager may have the compiler without cuBLAS, which is then the Python package
``nvidia-cublas``. The build needs no GPU and no driver.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from llamahybrid.errors import EngineError

_USUAL = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit."""

    root: Path
    release: str
    """The version from nvcc, e.g. ``13.0``."""

    @classmethod
    def find(cls) -> Toolkit:
        """Find the toolkit that the environment names, else the usual one.

        Raises:
            EngineError: not found.
        """
        named = [os.environ.get(name) for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME", "CUDAToolkit_ROOT")]
        for place in [Path(each) for each in (*named, shutil.which("nvcc"), _USUAL) if each]:
            nvcc = place if place.is_file() else place / "bin" / "nvcc"
            if nvcc.is_file() and (root := _root(nvcc)):
                said = _output(nvcc, "--version")
                if found := re.search(r"release (\d+\.\d+)", said):
                    return cls(root, found.group(1))
                raise EngineError(f"{nvcc} does not say which CUDA it is of: {said.strip()}")
        raise EngineError(
            "building for CUDA needs NVIDIA's toolkit: install it, and set CUDA_PATH to its folder if nvcc "
            "is not on the PATH"
        )

    def has(self, library: str) -> bool:
        """Tell whether a library, or a stub of it to link with, is included."""
        folders = (self.root / "lib64", *(self.root / "targets").glob("*-linux/lib"))
        return any((each / library).exists() for folder in folders for each in (folder, folder / "stubs"))


def _root(nvcc: Path) -> Path | None:
    """The folder of nvcc's toolkit; None: no headers are there.

    nvcc itself may be a script that starts the toolkit's, whose place `--dryrun` prints.
    """
    told = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    root = Path(told.group(1)).resolve() if told else nvcc.resolve().parents[1]
    return root if (root / "include" / "cuda_runtime.h").is_file() else None


def _output(nvcc: Path, *arguments: str) -> str:
    run = subprocess.run(
        [nvcc, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    return run.stdout


def cmake_args(architecture: str | None = None) -> str:
    """The CMAKE_ARGS of a CUDA build on this machine.

    Args:
        architecture: compute capability without the dot, e.g. ``90``; None: CUDAARCHS, else that of this
            machine's GPUs.

    Raises:
        EngineError: the toolkit, cuBLAS or the architecture is unknown.
    """
    if sys.platform == "win32":
        return "-DGGML_CUDA=on"  # the toolkit's installer configures CMake and Visual Studio
    toolkit = Toolkit.find()
    options = ["-DGGML_CUDA=on", "-DGGML_CUDA_NCCL=off"]
    if chosen := architecture or os.environ.get("CUDAARCHS") or present_architecture():
        options.append(f"-DCMAKE_CUDA_ARCHITECTURES={chosen}")
    else:
        raise EngineError("there is no GPU to build for; name one, as `--cuda-arch 90` for an H100 or H200")
    root = toolkit.root
    options += [f"-DCUDAToolkit_ROOT={root}", f"-DCMAKE_CUDA_COMPILER={root / 'bin' / 'nvcc'}"]
    if not toolkit.has("libcuda.so"):
        options.append("-DGGML_CUDA_NO_VMM=on")  # virtual memory is all that links with the driver
    if not ((root / "include" / "cublas_v2.h").exists() and toolkit.has("libcublas.so")):
        major = toolkit.release.partition(".")[0]
        blas = cublas(toolkit.release)
        for name in ("cublas", "cublasLt"):
            options.append(f"-DCUDA_{name}_LIBRARY={blas / 'lib' / f'lib{name}.so.{major}'}")
        # a system folder: the package may have headers of the toolkit, too, of another release
        options.append(f"-DCMAKE_CUDA_FLAGS=-isystem={blas / 'include'}")
    return " ".join(options)


def present_architecture() -> str:
    """Compute capabilities of this machine's GPUs, separated by `;` for CMake; empty: no GPU."""
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ";".join(sorted({line.replace(".", "").strip() for line in run.stdout.split() if "." in line}))


def cublas(release: str) -> Path:
    """The folder of the installed Python package with cuBLAS for a release of CUDA.

    Raises:
        EngineError: the package is not installed.
    """
    major = release.partition(".")[0]
    for place in [*map(Path, sys.path), *map(Path, site.getsitepackages())]:
        for name in (f"cu{major}", "cublas"):  # since CUDA 13 all packages share one folder
            folder = place / "nvidia" / name
            if (folder / "include" / "cublas_v2.h").is_file() and (
                folder / "lib" / f"libcublas.so.{major}"
            ).is_file():
                return folder
    package = "nvidia-cublas" if int(major) >= 13 else f"nvidia-cublas-cu{major}"
    raise EngineError(
        f"the CUDA toolkit has no cuBLAS: install all of it, or `pip install '{package}=={release}.*'`"
    )
