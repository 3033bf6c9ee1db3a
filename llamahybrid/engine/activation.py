"""Which libllama llama_cpp loads: decided when llamahybrid is imported, before llama_cpp is.

``LLAMAHYBRID_ENGINE`` is ``stock``, ``patched`` or a folder of libraries. Without it a ``LLAMA_CPP_LIB_PATH``
of the user's own is left alone; else the best patched engine that matches is taken, else stock. The
environment is not changed: a child process that imports llamahybrid decides anew, any other is left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from llamahybrid.engine import bindings, loading
from llamahybrid.errors import EngineError

_LLAMA, _MTMD = "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"


def activate() -> None:
    """Let llama_cpp load the engine to use; when it is loaded already, only warn if that is another one.

    An engine that ``LLAMAHYBRID_ENGINE`` names in vain is an EngineError when llama_cpp is imported, not
    before: the commands that say what there is, and build it, still run.
    """
    wish = os.environ.get("LLAMAHYBRID_ENGINE", "").strip()
    if not wish and _LLAMA in os.environ:
        loading.install(None)
    elif (loaded := bindings.loaded_from()) is not None:
        folder = wanted(wish) or bindings.stock()
        if loaded != folder:
            logging.getLogger("llamahybrid").warning(
                "llama_cpp was imported before llamahybrid, so the engine in %s stays loaded instead of %s; "
                "import llamahybrid first",
                loaded,
                folder,
            )
    elif wish == "stock":
        by_itself = not {_LLAMA, _MTMD} & os.environ.keys()
        loading.install(None if by_itself else loading.Plan(lambda: [bindings.stock()], wish))
    elif wish:
        loading.install(loading.Plan(_choice(wish), wish))
    else:
        loading.install(loading.Plan(lambda: _patched(_warn)))


def wanted(wish: str) -> Path | None:
    """The folder of libraries that a value of ``LLAMAHYBRID_ENGINE`` means; None: stock.

    Raises:
        EngineError: no such engine.
    """
    if wish == "stock":
        return None
    if wish in ("", "patched"):
        found = next(iter(_patched()), None)
        if found is None and wish:
            raise EngineError(
                "LLAMAHYBRID_ENGINE=patched, but no patched engine that was built matches; run "
                "`llamahybrid engine build` (`llamahybrid engine list` shows what there is and why it is not "
                "taken)"
            )
        return found
    from llamahybrid.engine.installed import library

    folder = Path(os.path.expanduser(wish)).resolve()
    lacking = [name for name in ("llama", "mtmd") if library(folder, name) is None]
    if lacking:
        raise EngineError(
            f"LLAMAHYBRID_ENGINE={wish} has no lib{' and no lib'.join(lacking)}; it takes stock, patched or "
            "a folder of libraries (`llamahybrid engine list` shows those that were built)"
        )
    return folder


def _choice(wish: str) -> Callable[[], Sequence[Path | None]]:
    """What was asked for; a path means what it does now, wherever the process goes."""
    if wish == "patched":
        return lambda: [wanted(wish)]
    path = os.path.abspath(os.path.expanduser(wish))
    return lambda: [_sound(wanted(path))]


def _sound(folder: Path | None) -> Path | None:
    """A folder of whole libraries, ours or not: one that is cut short would end the process."""
    from llamahybrid.engine import elf, installed

    engine = installed.owner(folder) if folder else None
    if engine is None:
        for path in sorted(path for path in folder.glob("*.so") if path.is_file()) if folder else ():
            try:
                if elf.cut_short(path):
                    raise EngineError(f"{path} is cut short: copy or build it again")
            except OSError as error:
                raise EngineError(f"{path} cannot be read: {error.strerror}") from error
        return folder
    if damage := engine.damage():
        raise EngineError(f"{damage}: run `llamahybrid engine build` again")
    version = bindings.version()
    if engine.version != (version or "").partition("+")[0]:
        logging.getLogger("llamahybrid").warning(
            "the engine in %s was made for llama-cpp-python %s, installed is %s: what crosses between them "
            "may mean something else to each",
            folder,
            engine.version,
            version,
        )
    return folder


def _patched(refused: Callable[[str], None] = lambda reason: None) -> Sequence[Path]:
    """The libraries of every engine that may replace stock, best first."""
    from llamahybrid.engine.choice import fitting

    return [engine.libraries for engine in fitting(refused=refused)]


def _warn(reason: str) -> None:
    logging.getLogger("llamahybrid").warning("a patched engine is not loaded: %s", reason)
