"""Importing is cheap, loads only what is needed, and points downward through the layers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import llamahybrid

PACKAGE = Path(__file__).parents[1] / "llamahybrid"


def loaded_after(code: str) -> set[str]:
    """Names of the modules a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import llamahybrid", {"llama_cpp", "numpy", "typer"}),
        (  # runs when nothing but platformdirs and filelock is installed
            "import llamahybrid.engine.sdist",
            {"llama_cpp", "numpy", "cffi", "xxhash", "typer", "diskcache", "rich"},
        ),
        ("import llamahybrid.capi.shim", {"llama_cpp"}),
        ("import llamahybrid.prompt_cache.cache", {"llama_cpp"}),
        ("import llamahybrid_pytest", {"llamahybrid", "llama_cpp", "numpy", "rich"}),
    ],
)
def test_an_import_loads_no_more_than_it_needs(code: str, unwanted: set[str]) -> None:
    loaded = loaded_after(code)
    assert code.split()[1] in loaded
    assert not unwanted & loaded


@pytest.mark.parametrize("name", llamahybrid.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(llamahybrid, name) is not None
    assert name in dir(llamahybrid)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        llamahybrid.nonsense  # noqa: B018


LAYERS = (
    "llamahybrid __main__ cli",
    "assertions program installation ray server events harness",
    "llama configuration",
    "client",
    "core speculation",
    "memory tiny",
    "prompt_cache",
    "devices capi engine children files signatures upstream",
    "errors",
)
"""Packages and modules of the top folder. Imports, for types too, go to the same layer or further down."""


def imports_of(module: str, node: ast.AST) -> Iterator[str]:
    """Modules of the package that a module imports anywhere."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield inner if inner in SOURCES else str(child.module)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        else:
            yield from imports_of(module, child)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
IMPORTS = {
    module: {target for target in imports_of(module, source) if target in SOURCES and target != module}
    for module, source in SOURCES.items()
}


def layer(module: str) -> int:
    room = module.split(".")[min(1, module.count("."))]
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms.split())


def test_imports_point_downward() -> None:
    upward = {(m, target) for m, targets in IMPORTS.items() for target in targets if layer(target) < layer(m)}
    assert not upward


def test_imports_form_no_circle() -> None:
    TopologicalSorter(IMPORTS).prepare()


def test_the_prompt_cache_imports_nothing_of_the_package_but_errors() -> None:
    room = "llamahybrid.prompt_cache"
    targets = {target for module, found in IMPORTS.items() if module.startswith(room) for target in found}
    assert {target for target in targets if not target.startswith(room)} <= {"llamahybrid.errors"}
