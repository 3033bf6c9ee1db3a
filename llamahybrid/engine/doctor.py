"""Says which engine llama_cpp loads here, what it can do, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamahybrid import native
from llamahybrid.engine import activation, installed
from llamahybrid.engine.installed import Engine

_UNVERIFIED = ("cuda", "hip", "musa", "metal", "vulkan", "sycl", "cann", "opencl", "blas", "rpc")
"""Backends that no recorded run of the suite has used."""
_COMPARE = "`llamahybrid probe MODEL --n-gpu-layers -1` compares it with stock"


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    topic: str
    text: str
    advice: str = ""
    """What to do next; empty: nothing."""


def examine() -> list[Finding]:
    """Load llama_cpp as any program would, and look at it.

    Raises:
        EngineError: the loaded library lacks a required function.
    """
    if activation.version() is None:
        return [Finding("llama-cpp-python", "not installed", "pip install 'llama-cpp-python>=0.3.36,<0.4'")]
    library = native.library()  # imports llama_cpp
    folder = activation.loaded_from()
    engine = next((e for e in installed.engines() if e.libraries.resolve() == folder), None)
    return [
        Finding("llama-cpp-python", str(activation.version())),
        _library(folder, engine),
        _mtmd(folder),
        _built(engine),
        _symbols(library),
        _shim(),
        *_backends(folder),
    ]


def _library(folder: Path | None, engine: Engine | None) -> Finding:
    if engine is not None:
        kind = f"from {engine.source}" if engine.source else "patched"
        version = activation.version()
        advice = ""
        if engine.version != version:
            advice = f"it was made for llama-cpp-python {engine.version}: run `llamahybrid engine build`"
        return Finding("engine", f"{kind}, {folder}", advice)
    if folder == activation.stock():
        return Finding("engine", f"stock, {folder}")
    return Finding("engine", f"another's, {folder}", "make sure it fits this llama-cpp-python")


def _mtmd(folder: Path | None) -> Finding:
    """Images and audio load a library of their own, which must come from the same build."""
    try:
        from llama_cpp import mtmd_cpp
    except (OSError, RuntimeError) as error:  # no such library, or one that cannot be loaded
        return Finding("libmtmd", f"cannot be loaded: {error}", "set MTMD_CPP_LIB to the engine's folder")
    there = Path(mtmd_cpp._libmtmd._name).resolve().parent
    if there != folder:
        return Finding("libmtmd", f"from another build, {there}", f"set MTMD_CPP_LIB={folder}")
    return Finding("libmtmd", "from the same build")


def _built(loaded: Engine | None) -> Finding:
    version = activation.version()
    engines = installed.engines()
    fitting = [engine for engine in engines if not engine.mismatch(version)]
    if loaded is not None and loaded in fitting:
        return Finding("patched engine", "in use")
    if fitting:
        return Finding(
            "patched engine", "built, not in use", "unset LLAMAHYBRID_ENGINE and LLAMA_CPP_LIB_PATH"
        )
    reasons = "; ".join(engine.mismatch(version) for engine in engines)
    return Finding(
        "patched engine",
        f"none that matches ({reasons})" if reasons else "none was built",
        "optional: `llamahybrid engine build`",
    )


def _symbols(library: native.Library) -> Finding:
    shown = (f"{name}: {'yes' if name in library.optional else 'no'}" for name in native.OPTIONAL)
    return Finding("optional functions", ", ".join(shown))


def _shim() -> Finding:
    if native.available:
        return Finding("native shim", "present")
    return Finding(
        "native shim",
        "missing: stops take effect between decodes only",
        "install a C++ compiler, then llamahybrid again",
    )


def _backends(folder: Path | None) -> list[Finding]:
    from llama_cpp import llama_cpp

    llama_cpp.llama_backend_init()
    names = {
        path.name.removeprefix("lib").split(".")[0].removeprefix("ggml-")
        for path in (folder.iterdir() if folder else ())
        if path.name.removeprefix("lib").startswith("ggml-")
    } - {"base"}
    offload = "" if llama_cpp.llama_supports_gpu_offload() else "; no GPU in use"
    findings = [Finding("backends", ", ".join(sorted(names)) + offload)]
    for name in sorted(names & set(_UNVERIFIED)):
        shown = {"cuda": "CUDA", "blas": "BLAS", "rpc": "RPC"}.get(name, name.capitalize())
        findings.append(Finding(shown, f"{shown}: built, not verified", _COMPARE))
    return findings
