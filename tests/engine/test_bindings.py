"""What is installed and what is loaded, told without importing llama_cpp."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamahybrid.engine import bindings

LOADED = """
import sys
from llamahybrid.engine import bindings
before = bindings.loaded_from(), bindings.version(), bindings.stock()
assert "llama_cpp" not in sys.modules
import llama_cpp
print(before[0], before[1] == llama_cpp.__version__, bindings.loaded_from() == before[2])
"""


def test_nothing_is_loaded_before_it_is_imported_and_then_it_is_known_from_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "stock")
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert run.stdout == "None True True\n"


def test_what_is_not_installed_has_no_version_and_no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bindings.version("llamahybrid") == metadata.version("llamahybrid")
    assert bindings.version("a package of another world") is None
    for spec in (None, SimpleNamespace(submodule_search_locations=None)):  # none, or a file without a folder
        monkeypatch.setattr(util, "find_spec", lambda name, spec=spec: spec)
        assert bindings.stock() is None


def test_stocks_libraries_lie_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "llama_cpp").symlink_to(tmp_path / "real")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "llama_cpp")])
    monkeypatch.setattr(util, "find_spec", lambda name: spec)
    assert bindings.stock() == tmp_path / "real" / "lib"
