"""Call a function as soon as a module has been imported, by any code."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

Then: TypeAlias = Callable[[ModuleType], None]


def after_import(name: str, then: Then) -> None:
    """Call `then` with the module of this name: now if it is imported, else at the end of its import.

    A repeated pair counts once. An exception of `then` makes the import fail.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder) and f.name == name), None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    if then not in finder.thens:
        finder.thens.append(then)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by the other finders, and adds to what its loader executes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thens: list[Then] = []

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == self.name:  # an archive has one loader for all modules
                    for then in self.thens:
                        then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
