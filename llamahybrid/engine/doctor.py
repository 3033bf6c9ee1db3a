"""Diagnosis: which engine llama_cpp loads here, its functions and backends, and advice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from llamahybrid import upstream
from llamahybrid.engine import activation, bindings, choice, installed, libraries, loaded, sdist, series
from llamahybrid.engine.choice import InstalledBindings
from llamahybrid.engine.installed import Engine

_VERIFIED = {"cpu", "rpc"}
"""Backends with a recorded run of the test suite."""
Gpus: TypeAlias = Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Finding:
    """A line of the diagnosis."""

    topic: str
    text: str
    advice: str = ""
    """The next step; empty: none."""


_NO_SHIM = Finding(
    "native shim",
    "missing: stops take effect between decodes only",
    "install a C++ compiler, then llamahybrid again",
)


def examine(load: Callable[[], Collection[str]], shim: bool, gpus: Gpus) -> list[Finding]:
    """Load llama_cpp and inspect it; if loading fails, inspect its files.

    Args:
        load: loads llama_cpp, and returns the functions of `upstream.OPTIONAL` that its library has.
        shim: the native shim is compiled.
        gpus: names the GPUs of the loaded library.
    """
    version = bindings.version()
    if version is None:
        return [Finding("llama-cpp-python", "not installed", "pip install 'llama-cpp-python>=0.3.36,<0.4'")]
    site, engine = InstalledBindings.here(), None
    try:
        functions = load()
    except (ImportError, OSError, RuntimeError) as error:  # EngineError among them
        folder = bindings.loaded_from() or bindings.stock()
        found = [Finding("engine", f"cannot be loaded: {error}", _load_advice(error))]
        use = "not loaded"
    else:
        folder = bindings.loaded_from()
        engine = next((e for e in installed.engines() if e.libraries.resolve() == folder), None)
        has = (f"{name}: {'yes' if name in functions else 'no'}" for name in upstream.OPTIONAL)
        found = [
            _engine(folder, engine, site),
            *_foreign_libraries(folder),
            _mtmd(folder),
            Finding("optional functions", ", ".join(has)),
            *_private_names(),
        ]
        use = ", ".join(gpus()) or "no GPU in use"
    return [
        _version(version),
        *found,
        _built(engine, site),
        Finding("native shim", "present") if shim else _NO_SHIM,
        *_backends(folder, use),
    ]


def _version(version: str) -> Finding:
    """Structures passed to libllama change from release to release, and ctypes does not check them."""
    least = sdist.PIN.version
    known = series.order(bindings.release(version)) >= series.order(least)
    advice = "" if known else f"too old: {least} is the first that is known to work"
    return Finding("llama-cpp-python", version, advice)


def _load_advice(error: Exception) -> str:
    if "libcuda.so" in str(error):
        return "the NVIDIA driver is missing: install it, or a llama-cpp-python without CUDA"
    if "libcublas" in str(error) or "libcudart" in str(error):
        return (
            "install the CUDA toolkit of that version, or set LD_LIBRARY_PATH to the folder of this library"
        )
    if str(error).startswith("LLAMAHYBRID_ENGINE="):
        return "unset LLAMAHYBRID_ENGINE, or set it to another engine"
    return "install llama-cpp-python again"


def _engine(folder: Path | None, engine: Engine | None, site: InstalledBindings) -> Finding:
    if engine is None:
        if folder == bindings.stock():
            return Finding("engine", f"stock, {folder}")
        return Finding("engine", f"another's, {folder}", "make sure it fits this llama-cpp-python")
    kind, advice = f"from {engine.source}" if engine.source else "patched", ""
    if engine.version != bindings.release(site.version):
        cure = choice.build_warning(site) or "run `llamahybrid engine build`"
        advice = f"it was made for llama-cpp-python {engine.version}: {cure}"
    elif damage := engine.damage(thorough=True):
        advice = f"{damage}: run `llamahybrid engine build`"
    return Finding("engine", f"{kind}, {folder}", advice)


def _foreign_libraries(folder: Path | None) -> list[Finding]:
    """Loaded ggml libraries of another build, as found by a library path of the system."""
    try:
        elsewhere = [path for path in loaded.libraries() if path.parent != folder]
    except OSError as error:
        return [Finding("libggml", str(error), "start the program again")]
    return [
        Finding("libggml", f"from another build, {path}", "unset LD_LIBRARY_PATH and LD_PRELOAD")
        for path in elsewhere
    ]


def _mtmd(folder: Path | None) -> Finding:
    """The library for images and audio, which must be of the same build."""
    try:
        from llama_cpp import mtmd_cpp
    except (OSError, RuntimeError) as error:  # missing, or not loadable
        return Finding("libmtmd", f"cannot be loaded: {error}", "set MTMD_CPP_LIB to the engine's folder")
    there = Path(mtmd_cpp._libmtmd._name).parent.resolve()
    if there != folder:
        return Finding("libmtmd", f"from another build, {there}", f"set MTMD_CPP_LIB={folder}")
    return Finding("libmtmd", "from the same build")


def _built(loaded: Engine | None, site: InstalledBindings) -> Finding:
    engines, topic = installed.engines(), "patched engine"
    reasons = {engine.folder: choice.mismatch(engine, site) for engine in engines}
    best = next((engine for engine in engines if not reasons[engine.folder]), None)
    if best is None:
        text = "; ".join([*reasons.values(), *installed.unreadable()])
        advice = choice.build_warning(site) or "`llamahybrid engine build`"
        return Finding(
            topic, f"none that matches ({text})" if text else "none was built", f"optional: {advice}"
        )
    if loaded is not None and not reasons.get(loaded.folder, "another"):
        return Finding(topic, "in use")
    if failed := activation.failures().get(best.libraries):
        text = f"built, and cannot be loaded: {failed}"
        return Finding(topic, text, "run `llamahybrid engine build --force`")
    return Finding(topic, "built, not in use", "unset LLAMAHYBRID_ENGINE and LLAMA_CPP_LIB_PATH")


def _private_names() -> list[Finding]:
    """Undocumented names of llama_cpp that llamahybrid uses."""
    found = list(upstream.differences())
    if not found:
        return [Finding("private names", "all as llamahybrid knows them")]
    advice = f"install llama-cpp-python {sdist.PIN.version}, or a newer llamahybrid"
    return [Finding("private names", str(difference), advice) for difference in found]


def _backends(folder: Path | None, use: str) -> list[Finding]:
    names = libraries.backends(folder)
    text = "cannot be told from its files" if names is None else ", ".join(sorted(names))
    findings = [Finding("backends", f"{text}; {use}")]
    if unverified := sorted((names or set()) - _VERIFIED):
        how = "`llamahybrid check --on ours --model MODEL --n-gpu-layers -1` tests them"
        findings.append(Finding("not verified", ", ".join(unverified), how))
    return findings
