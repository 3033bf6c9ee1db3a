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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from llamahybrid.engine import bindings
from llamahybrid.engine.import_hook import after_import
from llamahybrid.errors import EngineError

logger = logging.getLogger("llamahybrid")

_LLAMA, _MTMD = "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"
_MODULE = "llama_cpp._ctypes_extensions"

_request: str | None = None
"""The value of ``LLAMAHYBRID_ENGINE``: a failure is an error; empty: stock is the fallback; None: llama_cpp
searches by itself."""
_failures: dict[Path, str] = {}


def activate() -> None:
    """Make llama_cpp load the chosen engine; if another one is loaded already, warn.

    A ``LLAMAHYBRID_ENGINE`` that does not exist raises EngineError when llama_cpp is imported, not here, so
    that the commands that list and build engines still run.
    """
    global _request
    request = os.environ.get("LLAMAHYBRID_ENGINE", "").strip()
    theirs = {_LLAMA, _MTMD} & os.environ.keys()
    _request = None
    if (not request and _LLAMA in theirs) or (request == "stock" and not theirs):
        return
    if (loaded := bindings.loaded_from()) is not None:
        folder = resolve(request) or bindings.stock()
        if loaded != folder:
            logger.warning(
                "llama_cpp was imported before llamahybrid, so the engine in %s stays loaded instead of %s; "
                "import llamahybrid first",
                loaded,
                folder,
            )
        return
    named = request in ("", "stock", "patched")
    _request = request if named else os.path.abspath(os.path.expanduser(request))  # before any `chdir`
    after_import(_MODULE, _wrap)  # at once if an import of llama_cpp has failed before


def resolve(request: str) -> Path | None:
    """The folder of libraries that a value of ``LLAMAHYBRID_ENGINE`` names; None: nothing was built.

    Raises:
        EngineError: there is no such engine.
    """
    return next(_candidates(request), None)


def failures() -> dict[Path, str]:
    """Folders that could not be loaded in this process, with the reasons."""
    return dict(_failures)


def _candidates(request: str) -> Iterator[Path]:
    """The folders to load from, best first; none: nothing was built. Raises EngineError."""
    if request == "stock":
        if stock := bindings.stock():
            yield stock
        return
    if request in ("", "patched"):
        from llamahybrid.engine.choice import compatible_engines

        found = False
        for engine in compatible_engines():
            found = True
            yield engine.libraries
        if request and not found:
            raise EngineError(
                "LLAMAHYBRID_ENGINE=patched, but no patched engine that was built matches; run "
                "`llamahybrid engine build` (`llamahybrid engine list` shows what there is and why it is not "
                "taken)"
            )
        return
    from llamahybrid.engine.installed import library

    folder = Path(os.path.expanduser(request)).resolve()
    lacking = [name for name in ("llama", "mtmd") if library(folder, name) is None]
    if lacking:
        raise EngineError(
            f"LLAMAHYBRID_ENGINE={request} has no lib{' and no lib'.join(lacking)}; it takes stock, patched "
            "or a folder of libraries (`llamahybrid engine list` shows those that were built)"
        )
    yield folder


def _check(folder: Path) -> None:
    """Raise EngineError for damaged libraries, which would end the process."""
    from llamahybrid.engine import installed, libraries

    engine = installed.owner(folder)
    if engine is None:
        for path in sorted(path for path in folder.glob("*.so") if path.is_file()):
            if libraries.cut_short(path):
                raise EngineError(f"{path} is cut short: copy or build it again")
        return
    if damage := engine.damage():
        raise EngineError(f"{damage}: run `llamahybrid engine build` again")
    version = bindings.version()
    if engine.version != bindings.release(version):
        logger.warning(
            "the engine in %s was made for llama-cpp-python %s, installed is %s: structures that "
            "cross between them may differ",
            folder,
            engine.version,
            version,
        )


def _wrap(module: ModuleType) -> None:
    load = getattr(module, "load_shared_library", None)
    if load is None:
        if _request:
            raise EngineError(
                f"LLAMAHYBRID_ENGINE={_request}: this llama-cpp-python loads its library in "
                "another way; set LLAMA_CPP_LIB_PATH instead"
            )
        return
    if hasattr(load, "llamahybrid"):
        return
    beside: Path | None = None

    @functools.wraps(load)
    def load_shared_library(lib_base_name: str, base_path: Path) -> Any:
        nonlocal beside
        if lib_base_name == "llama":
            beside, library = _load_first(load, base_path)
            return library
        # the folder of libllama is used for libmtmd and libggml, too
        own = beside is None or lib_base_name not in ("mtmd", "ggml")
        return load(lib_base_name, base_path if own else beside)

    load_shared_library.llamahybrid = True  # type: ignore[attr-defined]
    module.load_shared_library = load_shared_library  # type: ignore[attr-defined]


def _load_first(load: Callable[[str, Path], Any], own: Path) -> tuple[Path | None, Any]:
    """Load libllama from the first candidate that works; return its folder (None: `own`) and handle."""
    failed = []
    try:
        for folder in () if _request is None else _candidates(_request):
            try:
                if _request not in ("", "stock", "patched"):
                    _check(folder)
                return folder, load("llama", folder)
            except (OSError, RuntimeError) as error:  # EngineError among them
                _failures[folder] = str(error)
                failed.append(str(error))
    except (OSError, RuntimeError) as error:
        if isinstance(error, EngineError) and _request:
            raise
        failed.append(str(error))
    reasons = "; ".join(failed)
    if failed and _request:
        raise EngineError(f"LLAMAHYBRID_ENGINE={_request} cannot be loaded: {reasons}")
    if failed:
        logger.warning(
            "the patched engine cannot be loaded, so llama-cpp-python's own library is: %s", reasons
        )
    return None, load("llama", own)
