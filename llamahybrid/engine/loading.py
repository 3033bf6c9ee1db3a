"""Makes llama_cpp load its libraries from another folder, in this process alone.

``LLAMA_CPP_LIB_PATH`` would do it too, and child processes would inherit it, under another llama-cpp-python
perhaps, or while another thread starts one. So it is not set: when ``llama_cpp._ctypes_extensions`` is
imported, its `load_shared_library` is told the folder.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from llamahybrid.engine.import_hook import after_import
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
    after_import(_MODULE, _redirect)  # at once, where an import of llama_cpp has failed before


def failures() -> dict[Path, str]:
    """Folders that were tried in vain in this process, and why."""
    return dict(_failures)


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
