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


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('__version__ = "9.8.7"\n', "9.8.7"),
        ("__version__ = '9.8.7'", "9.8.7"),
        ('__version__ = "0.3.36"', "0.3.36+cu124"),
        ("from .llama import *", "0.3.36+cu124"),
        (None, "0.3.36+cu124"),
    ],
)
def test_a_llama_cpp_before_the_installed_one_says_which_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None, version: str
) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    if said is not None:
        (package / "__init__.py").write_text(said)
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.36+cu124")
    monkeypatch.setattr(bindings, "stock", lambda: package / "lib")
    assert bindings.version() == version
    assert bindings.version("llamahybrid") == "0.3.36+cu124"


def test_a_checkout_on_the_path_is_known_by_its_own_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text('__version__ = "9.8.7"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(metadata, "version", _missing)
    assert bindings.version() == "9.8.7", "and nothing was installed"


def _missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)
