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
    """Finds one module by the other finders, and wraps its loader."""

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
            spec.loader = _Loader(spec.loader, self.thens)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, thens: list[Then]) -> None:
        self._loader = loader
        self._thens = thens

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for then in self._thens:
            then(module)
