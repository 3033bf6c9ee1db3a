"""A function is called after the import of one module, and of no other."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from llamahybrid.engine.import_hook import after_import

NAMES = ("hooked_first", "hooked_second", "hooked_other")


@pytest.fixture(params=["folder", "archive"])
def importable(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Three modules, in a folder (a loader each) or an archive (one loader for all)."""
    place = tmp_path / "modules"
    if request.param == "archive":
        with zipfile.ZipFile(place, "w") as archive:
            for name in NAMES:
                archive.writestr(f"{name}.py", "value = 1\n")
    else:
        place.mkdir()
        for name in NAMES:
            (place / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("importable")
def test_each_function_is_called_once_for_its_own_module() -> None:
    called: list[tuple[str, int]] = []

    def note(module: ModuleType) -> None:
        called.append((module.__name__, module.value))

    for name in ("hooked_first", "hooked_second", "hooked_first"):
        after_import(name, note)
    for name in NAMES:
        import_module(name)
    assert called == [("hooked_first", 1), ("hooked_second", 1)]
    after_import("hooked_other", note)
    assert called[2:] == [("hooked_other", 1)], "it is imported already"
