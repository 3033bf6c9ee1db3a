"""Which libllama llama_cpp loads: decided once, when llamahybrid is imported, before llama_cpp is.

``LLAMAHYBRID_ENGINE`` is ``stock``, ``patched`` or a folder of libraries. Without it a ``LLAMA_CPP_LIB_PATH``
of the user's own is left alone (and child processes go on with what their parent chose); else the latest
patched engine that matches is taken, else stock.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from llamahybrid.errors import EngineError

_LLAMA, _MTMD = "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"


def activate() -> None:
    """Point llama_cpp at the engine to use; when it is loaded already, only warn if that is another one.

    Raises:
        EngineError: ``LLAMAHYBRID_ENGINE`` names an engine that is not there.
    """
    wish = os.environ.get("LLAMAHYBRID_ENGINE", "")
    if not wish and _LLAMA in os.environ:
        return
    folder = wanted(wish)
    if "llama_cpp" in sys.modules:
        loaded = loaded_from()
        if loaded is not None and loaded != (folder or stock()):
            logging.getLogger("llamahybrid").warning(
                "llama_cpp was imported before llamahybrid, so the engine in %s stays loaded instead of %s; "
                "import llamahybrid first",
                loaded,
                folder or stock(),
            )
        return
    for name in (_LLAMA, _MTMD):
        if folder is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(folder)


def wanted(wish: str) -> Path | None:
    """The folder of libraries that a value of ``LLAMAHYBRID_ENGINE`` means; None: stock.

    Raises:
        EngineError: no such engine.
    """
    if wish == "stock":
        return None
    if wish in ("", "patched"):
        found = _patched()
        if found is None and wish:
            raise EngineError(
                "LLAMAHYBRID_ENGINE=patched, but no patched engine that was built matches; unset the "
                "variable and run `llamahybrid engine build` (`llamahybrid engine list` shows what there is)"
            )
        return found
    from llamahybrid.engine.installed import library

    folder = Path(wish).expanduser().resolve()
    lacking = [name for name in ("llama", "mtmd") if library(folder, name) is None]
    if lacking:
        raise EngineError(
            f"LLAMAHYBRID_ENGINE={wish} has no lib{' and no lib'.join(lacking)}; it takes stock, patched or "
            "a folder of libraries (`llamahybrid engine list` shows those that were built)"
        )
    return folder


def version() -> str | None:
    """The installed llama-cpp-python's, read without importing it; None: there is none."""
    from importlib import metadata  # slow to import, and seldom needed

    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


def stock() -> Path | None:
    """The folder of the libraries that llama-cpp-python brought along; None when it is not installed."""
    from importlib import metadata

    try:
        home = metadata.distribution("llama-cpp-python").locate_file("llama_cpp/lib")
    except metadata.PackageNotFoundError:
        return None
    return Path(str(home)).resolve()


def loaded_from() -> Path | None:
    """The folder that the llama_cpp of this process loaded libllama from; None: not loaded."""
    module = sys.modules.get("llama_cpp.llama_cpp")
    handle = getattr(module, "_lib", None)
    return None if handle is None else Path(handle._name).resolve().parent


def _patched() -> Path | None:
    from llamahybrid.engine import installed

    engines = installed.engines()
    if not engines:  # the usual case, and the version is not free to read
        return None
    here = version()
    return next((engine.libraries for engine in engines if not engine.mismatch(here)), None)
