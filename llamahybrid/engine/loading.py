"""Makes llama_cpp load its libraries from another folder, in this process alone.

``LLAMA_CPP_LIB_PATH`` would do it too, and child processes would inherit it, under another llama-cpp-python
perhaps, or while another thread starts one. So it is not set: when ``llama_cpp._ctypes_extensions`` is
imported, its `load_shared_library` is told the folder.
"""

from __future__ import annotations

import functools
import importlib.abc
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from llamahybrid.errors import EngineError

_MODULE = "llama_cpp._ctypes_extensions"
_NAMES = ("llama", "mtmd", "ggml")


@dataclass(frozen=True)
class Plan:
    """Where to look for the libraries."""

    candidates: Callable[[], Sequence[Path | None]]
    """Folders, best first, asked for when llama_cpp loads; None: where it looks by itself."""
    wish: str = ""
    """What the user asked for; then nothing else will do."""


_OWN = Plan(lambda: [None])
_lock = threading.RLock()
_plan = _OWN
_taken: Path | None = None
_failures: dict[Path, str] = {}


def install(plan: Plan | None) -> None:
    """From now on llama_cpp loads by `plan`; None: as it would by itself. What is loaded stays."""
    global _plan
    _plan = plan or _OWN
    if plan is None:
        return
    module = sys.modules.get(_MODULE)
    if module is not None:  # an import of llama_cpp has failed before, or is under way
        _redirect(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def failures() -> dict[Path, str]:
    """Folders that were tried in vain in this process, and why."""
    return dict(_failures)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as everybody else would, and changes it once it is there."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _redirect(module)


def _redirect(module: ModuleType) -> None:
    load = getattr(module, "load_shared_library", None)
    if load is None:
        if _plan.wish:
            raise EngineError(
                f"LLAMAHYBRID_ENGINE={_plan.wish}: this llama-cpp-python loads its library in another way; "
                "set LLAMA_CPP_LIB_PATH instead"
            )
        return
    if hasattr(load, "llamahybrid"):
        return

    @functools.wraps(load)
    def load_shared_library(lib_base_name: str, base_path: Path) -> Any:
        with _lock:
            return _load(load, lib_base_name, base_path)

    load_shared_library.llamahybrid = True  # type: ignore[attr-defined]
    module.load_shared_library = load_shared_library  # type: ignore[attr-defined]


def _load(load: Callable[[str, Path], Any], name: str, own: Path) -> Any:
    """Load one library; libllama decides for those that belong to it."""
    global _taken
    if name == "llama":
        _taken, library = _first(load, own)
        return library
    return load(name, _taken if _taken is not None and name in _NAMES else own)


def _first(load: Callable[[str, Path], Any], own: Path) -> tuple[Path | None, Any]:
    failed = []
    try:
        candidates = _plan.candidates()
    except EngineError as error:
        if _plan.wish:
            raise
        candidates, failed = [], [str(error)]
    for folder in candidates:
        if folder is None:
            break
        try:
            return folder, load("llama", folder)
        except (OSError, RuntimeError) as error:
            _failures[folder] = str(error)
            failed.append(str(error))
    reasons = "; ".join(failed)
    if failed and _plan.wish:
        raise EngineError(f"LLAMAHYBRID_ENGINE={_plan.wish} cannot be loaded: {reasons}")
    if failed:
        logging.getLogger("llamahybrid").warning(
            "the patched engine cannot be loaded, so llama-cpp-python's own library is: %s", reasons
        )
    return None, load("llama", own)
