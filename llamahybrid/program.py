"""`llamahybrid run`: run a script or module written for llama_cpp with llamahybrid installed in its place.

`sys.argv`, `sys.path[0]`, `__main__` and the exit status are as with `python PROGRAM` and `python -m MODULE`.
llama_cpp is not imported before the program, which may set `CUDA_VISIBLE_DEVICES` or `OMP_NUM_THREADS` first.
Child processes are unchanged, unless they are forked.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from io import open_code
from types import ModuleType
from typing import Any

from llamahybrid import configuration
from llamahybrid.engine.import_hook import Then, after_import
from llamahybrid.errors import ConfigurationError

_OURS = {"llamahybrid.llama": "Llama", "llamahybrid.installation": "install"}
"""Our modules that import llama_cpp, each with the last name that it defines."""

_RUN_AS_MAIN: Callable[..., Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
"""The function behind `python -m` and `python FOLDER`: it runs the program in the `__main__` that is there,
for threads and exit functions, too. `runpy.run_module` would restore the previous one at the end, and change
`sys.argv`."""

USAGE = "usage: llamahybrid run PROGRAM [ARGUMENT ...]\n       llamahybrid run -m MODULE [ARGUMENT ...]"


def run(arguments: Sequence[str], then: Callable[[], None] | None = None) -> int:
    """Run a program and return 0; 2 for invalid arguments or environment.

    `then` is called once after llama_cpp was imported and `install` has run. Exceptions of the program,
    SystemExit among them, propagate; SystemExit with the reason for a module that cannot be run.
    """
    as_module = bool(arguments) and arguments[0].startswith("-m")
    rest = [*filter(None, [arguments[0][2:]]), *arguments[1:]] if as_module else list(arguments)
    if not rest or (not as_module and rest[0].startswith("-")):
        return _failed(USAGE)
    try:
        configuration.current()
    except ConfigurationError as error:
        return _failed(f"error: {error}")
    path = os.path.abspath(rest[0])
    if not as_module and not os.path.exists(path):
        return _failed(f"llamahybrid run: can't open file {path!r}: no such file")
    once = _installer(then)
    for module in ("llama_cpp", *_OURS):
        after_import(module, once)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if as_module:
        _set_first_path(os.getcwd())
        sys.argv[:] = ["-m", *rest[1:]]  # during the import of parent packages, as with `python -m`
        _RUN_AS_MAIN(rest[0])
        return 0
    sys.argv[:] = rest
    if pkgutil.get_importer(path) is not None:  # a folder, or an archive
        _set_first_path(path, always=True)
        _RUN_AS_MAIN("__main__", alter_argv=False)
        return 0
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    if isinstance(loader, SourcelessFileLoader):
        code = loader.get_code("__main__")
        assert code is not None, "it has a file"
    else:
        with open_code(path) as file:  # not `get_code`, which would write a .pyc
            code = compile(file.read(), path, "exec", dont_inherit=True)  # without our __future__ imports
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
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


def _failed(text: str) -> int:
    print(text, file=sys.stderr)
    return 2
