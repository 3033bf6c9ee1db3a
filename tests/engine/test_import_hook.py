"""Something done as soon as a module is there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from llamahybrid.engine.import_hook import _Finder, after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "hooked_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hooked_module"
    sys.modules.pop("hooked_module", None)
    sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "name", "") != "hooked_module"]


def test_once_inside_the_import_and_at_once_where_it_is_there(module: str) -> None:
    seen: list[int] = []

    def then(found: ModuleType) -> None:
        seen.append(found.value)
        found.value = 2

    after_import(module, then)
    after_import(module, then)
    assert sum(isinstance(f, _Finder) and f.name == module for f in sys.meta_path) == 1
    assert not seen
    imported = importlib.import_module(module)
    assert seen == [1]
    assert imported.value == 2
    assert type(imported.__loader__).__name__ == type(imported.__spec__.loader).__name__ == "SourceFileLoader"
    after_import(module, then)
    assert seen == [1, 2]


def test_several_are_each_called(module: str) -> None:
    seen: list[str] = []
    after_import(module, lambda found: seen.append("a"))
    after_import(module, lambda found: seen.append("b"))
    importlib.import_module(module)
    assert sorted(seen) == ["a", "b"]


def test_what_it_raises_makes_the_import_fail(module: str) -> None:
    def then(found: ModuleType) -> None:
        raise LookupError("no")

    after_import(module, then)
    with pytest.raises(LookupError):
        importlib.import_module(module)
    assert module not in sys.modules
