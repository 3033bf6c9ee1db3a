"""`llamahybrid run`: run a script or module written for llama_cpp with llamahybrid installed in its place.

`sys.argv`, `sys.path[0]`, `__main__` and the exit status are as with `python PROGRAM` and `python -m MODULE`.
llama_cpp is not imported before the program, which may set `CUDA_VISIBLE_DEVICES` or `OMP_NUM_THREADS` first.
Child processes are unchanged, unless they are forked.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any

from llamahybrid import configuration
from llamahybrid.engine.import_hook import Then, after_import
from llamahybrid.errors import ConfigurationError

_OURS = {"llamahybrid.llama": "Llama", "llamahybrid.installation": "install"}
"""Our modules that import llama_cpp, each with the last name that it defines."""

USAGE = "usage: llamahybrid run PROGRAM [ARGUMENT ...]\n       llamahybrid run -m MODULE [ARGUMENT ...]"


def run(arguments: Sequence[str], then: Callable[[], None] | None = None) -> int:
    """Run a program and return 0; 2 for invalid arguments or environment, 1 for a module that cannot be run.

    `then` is called once after llama_cpp was imported and `install` has run. Exceptions of the program,
    SystemExit among them, propagate.
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
        sys.argv[:] = ["-m", *rest[1:]]  # during the import of parent packages, as with `python -m`
        if (spec := _found(name)) is None:
            return _failed(f"llamahybrid run: No module named {name}", 1)
        if spec.submodule_search_locations is not None and (spec := _found(f"{name}.__main__")) is None:
            return _failed(f"llamahybrid run: {name} is a package without a __main__ module", 1)
        sys.argv[0] = str(spec.origin)
        return _run_found(spec, name)
    sys.argv[:] = rest
    path = os.path.abspath(name)
    if (inside := pkgutil.get_importer(path)) is not None:  # a folder, or an archive
        spec = inside.find_spec("__main__")
        if spec is None:
            return _failed(f"llamahybrid run: can't find '__main__' module in {path!r}", 1)
        _set_first_path(path, always=True)
        return _run_found(spec, name)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    return _run_script(path)


def _run_script(path: str) -> int:
    compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    if compiled:
        code = loader.get_code("__main__")
    else:
        with io.open_code(path) as file:  # not `get_code`, which would write a .pyc
            # without this file's __future__ imports
            code = compile(file.read(), path, "exec", dont_inherit=True)
    assert code is not None, "it has a file"
    return _execute(code, __file__=path, __loader__=loader, __cached__=None)


def _run_found(spec: ModuleSpec, name: str) -> int:
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:  # it is built in, say
        return _failed(f"llamahybrid run: there is no code of {name}", 1)
    places = {"__file__": spec.origin, "__cached__": spec.cached, "__package__": spec.parent}
    return _execute(code, __spec__=spec, __loader__=loader, **places)


def _execute(code: CodeType, **names: Any) -> int:
    """Execute code as `__main__`, for threads and exit functions, too.

    `runpy` would restore the previous `__main__` at the end, and change `sys.argv`.
    """
    main = ModuleType("__main__")
    main.__dict__.update(names, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
    return 0


def _installer(then: Callable[[], None] | None) -> Then:
    """A function that calls `install` once, when no module of ours is half imported."""
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


def _set_first_path(folder: str, always: bool = False) -> None:
    """Replace the first entry of `sys.path`, which is this command's; under `python -P` there is none.

    `always`: for a program in a folder or an archive, insert under `python -P`, too.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [folder]
    elif always:
        sys.path.insert(0, folder)


def _found(name: str) -> ModuleSpec | None:
    """Find a module's spec, importing its parent packages, whose exceptions propagate."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a dependency of a parent package is missing
        return None


def _failed(text: str, status: int) -> int:
    print(text, file=sys.stderr)
    return status
