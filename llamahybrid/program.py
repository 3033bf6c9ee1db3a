"""`llamahybrid run`: a script or module that knows llama_cpp alone, with ours in its place (`install`).

As `python PROGRAM` and `python -m MODULE` would run it: `sys.argv`, `sys.path[0]`, `__main__`, exit status.
llama_cpp is not imported for it: a program may set `CUDA_VISIBLE_DEVICES` or `OMP_NUM_THREADS` first. What it
starts as processes of their own is not changed, unless they are forked.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType

from llamahybrid import configuration
from llamahybrid.engine.import_hook import Then, after_import
from llamahybrid.errors import ConfigurationError

_OURS = {"llamahybrid.llama": "Llama", "llamahybrid.installation": "install"}
"""Modules that import llama_cpp, where the program imports them itself, and what they lack until then."""

USAGE = "usage: llamahybrid run PROGRAM [ARGUMENT ...]\n       llamahybrid run -m MODULE [ARGUMENT ...]"


def run(arguments: Sequence[str], then: Callable[[], None] | None = None) -> int:
    """Run a program; 2 where there is none or the environment means nothing, 1 for a module or folder that
    cannot be run, else 0.

    `then` is called once llama_cpp is there and ours is in its place.
    Whatever the program raises, SystemExit among it, comes through.
    """
    as_module = bool(arguments) and arguments[0].startswith("-m")
    if as_module:
        attached = arguments[0][2:]
        rest = [attached, *arguments[1:]] if attached else list(arguments[1:])
    else:
        rest = list(arguments)
    if not rest or (not as_module and rest[0].startswith("-")):
        return _failed(USAGE, 2)
    try:
        configuration.current()
    except ConfigurationError as error:
        return _failed(f"error: {error}", 2)
    name = rest[0]
    if not as_module and not os.path.exists(name):
        return _failed(f"llamahybrid run: can't open file {os.path.abspath(name)!r}: no such file", 2)
    once = _installer(then)
    for module in ("llama_cpp", *_OURS):
        after_import(module, once)
    if as_module:
        _set_first_path(os.getcwd())
        if _missing(name):
            return _failed(f"llamahybrid run: No module named {name}", 1)
        sys.argv[:] = ["-m", *rest[1:]]  # runpy puts the file's path in the first place
        if _not_executable(name):
            return _failed(f"llamahybrid run: {name} is a package without a __main__ module", 1)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0
    sys.argv[:] = rest
    path = os.path.abspath(name)
    if (inside := pkgutil.get_importer(path)) is not None:  # a folder, or an archive
        if inside.find_spec("__main__") is None:
            return _failed(f"llamahybrid run: can't find '__main__' module in {path!r}", 1)
        del sys.path[:1]  # runpy puts it there itself
        runpy.run_path(path, run_name="__main__")
    else:
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        _run_script(path)
    return 0


def _run_script(path: str) -> None:
    """As `runpy.run_path`, which would put the absolute path into `sys.argv` or a relative one in `__file__`.

    The module stays what `__main__` is: to threads, and to functions that are called at the end.
    """
    compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins)
    if compiled:
        code = loader.get_code("__main__")
    else:
        with io.open_code(path) as file:  # not `get_code`, which would write a .pyc
            code = compile(file.read(), path, "exec")
    assert code is not None, "it has a file"
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _installer(then: Callable[[], None] | None) -> Then:
    """Installs, once: as soon as llama_cpp is there, and not half of ours, which imports it."""
    done = False

    def install_once(module: ModuleType) -> None:
        nonlocal done
        half = [n for n, what in _OURS.items() if n in sys.modules and not hasattr(sys.modules[n], what)]
        if done or half:
            return
        done = True
        from llamahybrid.installation import install

        install()
        if then is not None:
            then()

    return install_once


def _set_first_path(folder: str) -> None:
    """In place of what was put there for this process; under `python -P` there is nothing."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [folder]


def _missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # a package above it
        return True


def _not_executable(name: str) -> bool:
    """It is a package without `__main__`; imports it, as runpy does."""
    spec = importlib.util.find_spec(name)
    package = spec is not None and spec.submodule_search_locations is not None
    return package and importlib.util.find_spec(f"{name}.__main__") is None


def _failed(text: str, status: int) -> int:
    print(text, file=sys.stderr)
    return status
