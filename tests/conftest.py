"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import llamahybrid.engine.activation

os.environ.setdefault("LLAMAHYBRID_ENGINE", "stock")  # chosen, whatever was built on this machine
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread costs more than it saves

llamahybrid.engine.activation.activate()  # before any test module imports llama_cpp

TinyModel: TypeAlias = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model(arch, **kw)`: the path of such a model (arguments of `tiny.make`), made once a session."""
    from llamahybrid import tiny

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[object, ...], Path] = {}

    def make(arch: str, **kw: Any) -> Path:
        key = (arch, *sorted(kw.items()))
        if key not in made:
            made[key] = tiny.make(arch, folder / f"{len(made)}-{arch}.gguf", **kw)
        return made[key]

    return make


_NATIVE = (
    "differential",
    "harness",
    "live",
    "patches",
    "upstream",
    "test_llama.py",
    "test_native.py",
    "test_tiny.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs llama.cpp as `native`: such tests run once per engine, all others once."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in _NATIVE:
            item.add_marker("native")


def pytest_report_header() -> str:
    """Which engine this run is about."""
    return f"engine: {os.environ.get('LLAMA_CPP_LIB_PATH', 'stock')}"
