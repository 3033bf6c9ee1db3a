"""Says which engine llama_cpp loads here, what it can do, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from llamahybrid import upstream
from llamahybrid.engine import backends, bindings, choice, installed, loading, sdist, symbols
from llamahybrid.engine.choice import Site
from llamahybrid.engine.installed import Engine

_UNVERIFIED = ("cuda", "hip", "musa", "metal", "vulkan", "sycl", "cann", "opencl", "blas")
"""Backends that no recorded run of the suite has used."""
_SHOWN = {"cuda": "CUDA", "blas": "BLAS", "hip": "HIP", "sycl": "SYCL", "cann": "CANN", "opencl": "OpenCL"}
_COMPARE = "`llamahybrid check --on ours --model MODEL --n-gpu-layers -1` tests it"
Gpus: TypeAlias = Callable[[], Sequence[str]]
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    topic: str
    text: str
    advice: str = ""
    """What to do next; empty: nothing."""


def examine(load: Callable[[], Collection[str]], shim: bool, gpus: Gpus) -> list[Finding]:
    """Load llama_cpp as any program would, and look at it; what cannot be loaded is told from its files.

    Args:
        load: loads it, and gives those of `upstream.OPTIONAL` that its library has.
        shim: the native shim was compiled.
        gpus: names the GPUs that the loaded library has found.
    """
    version = bindings.version()
    if version is None:
        return [Finding("llama-cpp-python", "not installed", "pip install 'llama-cpp-python>=0.3.36,<0.4'")]
    site = Site.here()
    try:
        optional = load()
    except (ImportError, OSError, RuntimeError) as error:  # EngineError is one
        folder = bindings.loaded_from() or bindings.stock()
        return [
            _version(version),
            Finding("engine", f"cannot be loaded: {error}", _why_not(str(error))),
            _built(None, site),
            _functions(symbols.named(folder) if folder else ()),
            _shim(shim),
            *_backends(folder, gpus, loaded=False),
        ]
    folder = bindings.loaded_from()
    engine = next((e for e in installed.engines() if e.libraries.resolve() == folder), None)
    return [
        _version(version),
        _library(folder, engine, site),
        *_mixed(folder),
        _mtmd(folder),
        _built(engine, site),
        _functions(optional),
        *_names(),
        _shim(shim),
        *_backends(folder, gpus, loaded=True),
    ]


def _version(version: str) -> Finding:
    """The structures that cross into libllama change from release to release, and nothing checks them all."""
    numbers, least = (
        [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]
        for text in (version, sdist.PIN.version)
    )
    advice = "" if numbers >= least else f"too old: {sdist.PIN.version} is the first that is known to work"
    return Finding("llama-cpp-python", version, advice)


def _why_not(error: str) -> str:
    if "libcuda.so" in error:
        return "the NVIDIA driver is missing: install it, or a llama-cpp-python without CUDA"
    return "install llama-cpp-python again, or choose LLAMAHYBRID_ENGINE=stock"


def _library(folder: Path | None, engine: Engine | None, site: Site) -> Finding:
    if engine is not None:
        kind = f"from {engine.source}" if engine.source else "patched"
        advice = ""
        if engine.version != str(site.version).partition("+")[0]:
            cure = choice.forecast(site) or "run `llamahybrid engine build`"
            advice = f"it was made for llama-cpp-python {engine.version}: {cure}"
        elif damage := engine.damage(thorough=True):
            advice = f"{damage}: run `llamahybrid engine build`"
        return Finding("engine", f"{kind}, {folder}", advice)
    if folder == bindings.stock():
        return Finding("engine", f"stock, {folder}")
    return Finding("engine", f"another's, {folder}", "make sure it fits this llama-cpp-python")


def _mixed(folder: Path | None) -> list[Finding]:
    """A library path of the system's may put another build's ggml under this libllama."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/lib") and ".so" in line}
    elsewhere = {
        path for path in paths if path.name.startswith(("libggml", "libllama.")) and path.parent != folder
    }
    return [
        Finding("libggml", f"from another build, {path}", "unset LD_LIBRARY_PATH and LD_PRELOAD")
        for path in sorted(elsewhere)
    ]


def _mtmd(folder: Path | None) -> Finding:
    """Images and audio load a library of their own, which must come from the same build."""
    try:
        from llama_cpp import mtmd_cpp
    except (OSError, RuntimeError) as error:  # no such library, or one that cannot be loaded
        return Finding("libmtmd", f"cannot be loaded: {error}", "set MTMD_CPP_LIB to the engine's folder")
    there = Path(mtmd_cpp._libmtmd._name).parent.resolve()
    if there != folder:
        return Finding("libmtmd", f"from another build, {there}", f"set MTMD_CPP_LIB={folder}")
    return Finding("libmtmd", "from the same build")


def _built(loaded: Engine | None, site: Site) -> Finding:
    engines = installed.engines()
    reasons = [choice.mismatch(engine, site) for engine in engines]
    fitting = [engine for engine, reason in zip(engines, reasons, strict=True) if not reason]
    failed = loading.failures()
    if loaded is not None and loaded in fitting:
        return Finding("patched engine", "in use")
    if broken := next((engine for engine in fitting if engine.libraries in failed), None):
        return Finding(
            "patched engine",
            f"built, and cannot be loaded: {failed[broken.libraries]}",
            "run `llamahybrid engine build --force`",
        )
    if fitting:
        return Finding(
            "patched engine", "built, not in use", "unset LLAMAHYBRID_ENGINE and LLAMA_CPP_LIB_PATH"
        )
    text = "; ".join([*reasons, *installed.unreadable()])
    advice = choice.forecast(site) or "`llamahybrid engine build`"
    return Finding(
        "patched engine", f"none that matches ({text})" if text else "none was built", f"optional: {advice}"
    )


def _functions(names: Collection[str]) -> Finding:
    shown = (f"{name}: {'yes' if name in names else 'no'}" for name in upstream.OPTIONAL)
    return Finding("optional functions", ", ".join(shown))


def _names() -> list[Finding]:
    """What llamahybrid leans on in llama_cpp beyond its documented interface."""
    found = upstream.differences()
    if not found:
        return [Finding("private names", f"all {len(upstream.NEEDS)} as llamahybrid knows them")]
    advice = f"install llama-cpp-python {sdist.PIN.version}, or a newer llamahybrid"
    return [Finding("private names", str(difference), advice) for difference in found]


def _shim(present: bool) -> Finding:
    if present:
        return Finding("native shim", "present")
    return Finding(
        "native shim",
        "missing: stops take effect between decodes only",
        "install a C++ compiler, then llamahybrid again",
    )


def _backends(folder: Path | None, gpus: Gpus, *, loaded: bool) -> list[Finding]:
    names = backends.of(folder)
    told = "cannot be told from its files" if names is None else ", ".join(sorted(names))
    findings = [Finding("backends", told + _offload(loaded, gpus))]
    for name in sorted((names or frozenset()) & set(_UNVERIFIED)):
        shown = _SHOWN.get(name, name.capitalize())
        toolkit = backends.needs(folder, name) if folder else []
        needs = f"; it needs {', '.join(toolkit)}" if toolkit else ""
        findings.append(Finding(shown, f"{shown}: built, not verified{needs}", _COMPARE))
    if "rpc" in (names or ()):
        findings.append(Finding("RPC", "layers can lie on other machines", "Llama(rpc_servers=...)"))
    return findings


def _offload(loaded: bool, gpus: Gpus) -> str:
    if not loaded:
        return "; not loaded"
    found = gpus()
    return f"; {', '.join(found)}" if found else "; no GPU in use"
