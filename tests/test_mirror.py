"""Tests mirror the package: `llamahybrid/memory/paging.py` has `tests/memory/test_paging.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "llamahybrid"


def has_code(path: Path) -> bool:
    """More than a docstring, imports and `__all__`."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    plain = (ast.Import, ast.ImportFrom, ast.Expr)
    rest = (node for node in body if not isinstance(node, plain))
    return any(not ast.unparse(node).startswith("__all__ =") for node in rest)


def mirror(path: Path) -> Path:
    """Where the tests of a module belong, relative to the root; those of a room's `__init__` beside it."""
    inside = path.relative_to(PACKAGE)
    if inside == Path("__init__.py"):
        return Path("tests/test_imports.py")  # all it does is to import
    if inside.name == "__init__.py":
        inside = inside.parent.with_suffix(".py")
    return Path("tests", inside.parent, f"test_{inside.name}")


MODULES = {path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py" and has_code(path)}


def test_each_module_has_a_test_file() -> None:
    without = sorted(p.relative_to(PACKAGE).as_posix() for p in MODULES if not (ROOT / mirror(p)).is_file())
    assert not without, f"no test file mirrors {without}"


def test_the_mirror() -> None:
    assert mirror(PACKAGE / "memory/paging.py") == Path("tests/memory/test_paging.py")
    assert mirror(PACKAGE / "llama.py") == Path("tests/test_llama.py")
    assert mirror(PACKAGE / "tiny/__init__.py") == Path("tests/test_tiny.py")
    assert mirror(PACKAGE / "__init__.py") == Path("tests/test_imports.py")
    assert not has_code(PACKAGE / "memory/__init__.py")
    assert not has_code(PACKAGE / "prompt_cache/__init__.py")
    assert has_code(PACKAGE / "memory/paging.py")
