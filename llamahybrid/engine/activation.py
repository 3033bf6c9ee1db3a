"""Which libllama llama_cpp loads: decided when llamahybrid is imported, before llama_cpp is.

``LLAMAHYBRID_ENGINE`` is ``stock``, ``patched`` or a folder of libraries. Without it a ``LLAMA_CPP_LIB_PATH``
of the user's is respected; else the best patched engine that matches is loaded, else stock.

The environment is unchanged, so that child processes do not inherit the choice, perhaps with another
llama-cpp-python: the `load_shared_library` of ``llama_cpp._ctypes_extensions`` is wrapped instead.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from llamahybrid.engine import bindings
from llamahybrid.engine.import_hook import after_import
from llamahybrid.errors import EngineError

logger = logging.getLogger("llamahybrid")

_LLAMA, _MTMD = "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"
_MODULE = "llama_cpp._ctypes_extensions"
_NAMES = ("llama", "mtmd", "ggml")


@dataclass(frozen=True)
class Plan:
    """The folders from which llama_cpp loads its libraries."""

    candidates: Callable[[], Sequence[Path | None]]
    """Folders, best first, evaluated when llama_cpp loads; None: llama_cpp's own search."""
    request: str = ""
    """The value of ``LLAMAHYBRID_ENGINE``: a failure is then an error; empty: stock is the fallback."""


_OWN = Plan(lambda: [None])
_lock = threading.RLock()
_plan = _OWN
_loaded_folder: Path | None = None
_failures: dict[Path, str] = {}


def activate() -> None:
    """Make llama_cpp load the chosen engine; if another one is loaded already, warn.

    A ``LLAMAHYBRID_ENGINE`` that does not exist raises EngineError when llama_cpp is imported, not here, so
    that the commands that list and build engines still run.
    """
    request = os.environ.get("LLAMAHYBRID_ENGINE", "").strip()
    if not request and _LLAMA in os.environ:
        _install(None)
    elif (loaded := bindings.loaded_from()) is not None:
        folder = resolve(request) or bindings.stock()
        if loaded != folder:
            logger.warning(
                "llama_cpp was imported before llamahybrid, so the engine in %s stays loaded instead of %s; "
                "import llamahybrid first",
                loaded,
                folder,
            )
    elif request == "stock":
        by_itself = not {_LLAMA, _MTMD} & os.environ.keys()
        _install(None if by_itself else Plan(lambda: [bindings.stock()], request))
    elif request:
        _install(Plan(_requested(request), request))
    else:
        _install(Plan(lambda: _patched(_warn)))


def resolve(request: str) -> Path | None:
    """The folder of libraries that a value of ``LLAMAHYBRID_ENGINE`` names; None: stock.

    Raises:
        EngineError: there is no such engine.
    """
    if request == "stock":
        return None
    if request in ("", "patched"):
        found = next(iter(_patched()), None)
        if found is None and request:
            raise EngineError(
                "LLAMAHYBRID_ENGINE=patched, but no patched engine that was built matches; run "
                "`llamahybrid engine build` (`llamahybrid engine list` shows what there is and why it is not "
                "taken)"
            )
        return found
    from llamahybrid.engine.installed import library

    folder = Path(os.path.expanduser(request)).resolve()
    lacking = [name for name in ("llama", "mtmd") if library(folder, name) is None]
    if lacking:
        raise EngineError(
            f"LLAMAHYBRID_ENGINE={request} has no lib{' and no lib'.join(lacking)}; it takes stock, patched "
            "or a folder of libraries (`llamahybrid engine list` shows those that were built)"
        )
    return folder


def failures() -> dict[Path, str]:
    """Folders that could not be loaded in this process, with the reasons."""
    return dict(_failures)


def _requested(request: str) -> Callable[[], Sequence[Path | None]]:
    """Candidates of an explicit request; a relative path is resolved now, before any `chdir`."""
    if request == "patched":
        return lambda: [resolve(request)]
    path = os.path.abspath(os.path.expanduser(request))
    return lambda: [_checked(resolve(path))]


def _checked(folder: Path | None) -> Path | None:
    """Raise EngineError for damaged libraries: loading a truncated one would end the process."""
    from llamahybrid.engine import installed, libraries

    engine = installed.owner(folder) if folder else None
    if engine is None:
        for path in sorted(path for path in folder.glob("*.so") if path.is_file()) if folder else ():
            try:
                if libraries.cut_short(path):
                    raise EngineError(f"{path} is cut short: copy or build it again")
            except OSError as error:
                raise EngineError(f"{path} cannot be read: {error.strerror}") from error
        return folder
    if damage := engine.damage():
        raise EngineError(f"{damage}: run `llamahybrid engine build` again")
    version = bindings.version()
    if engine.version != (version or "").partition("+")[0]:
        logger.warning(
            "the engine in %s was made for llama-cpp-python %s, installed is %s: structures that "
            "cross between them may differ",
            folder,
            engine.version,
            version,
        )
    return folder


def _patched(refused: Callable[[str], None] = lambda reason: None) -> Sequence[Path]:
    """The libraries of every engine that may replace stock, best first."""
    from llamahybrid.engine.choice import compatible_engines

    return [engine.libraries for engine in compatible_engines(refused=refused)]


def _warn(reason: str) -> None:
    logger.warning("a patched engine is not loaded: %s", reason)


# -- loading ---------------------------------------------------------------------------------------


def _install(plan: Plan | None) -> None:
    """Make llama_cpp load by `plan` (None: by its own search). Loaded libraries stay."""
    global _plan
    _plan = plan or _OWN
    if plan is not None:
        after_import(_MODULE, _wrap)  # at once if an import of llama_cpp has failed before


def _wrap(module: ModuleType) -> None:
    load = getattr(module, "load_shared_library", None)
    if load is None:
        if _plan.request:
            raise EngineError(
                f"LLAMAHYBRID_ENGINE={_plan.request}: this llama-cpp-python loads its library in "
                "another way; set LLAMA_CPP_LIB_PATH instead"
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
    """Load one library; the folder of libllama is used for libmtmd and libggml, too."""
    global _loaded_folder
    if name == "llama":
        _loaded_folder, library = _load_first(load, own)
        return library
    return load(name, _loaded_folder if _loaded_folder is not None and name in _NAMES else own)


def _load_first(load: Callable[[str, Path], Any], own: Path) -> tuple[Path | None, Any]:
    """Load libllama from the first candidate that works; return its folder (None: `own`) and handle."""
    failed = []
    try:
        candidates = _plan.candidates()
    except EngineError as error:
        if _plan.request:
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
    if failed and _plan.request:
        raise EngineError(f"LLAMAHYBRID_ENGINE={_plan.request} cannot be loaded: {reasons}")
    if failed:
        logger.warning(
            "the patched engine cannot be loaded, so llama-cpp-python's own library is: %s", reasons
        )
    return None, load("llama", own)
