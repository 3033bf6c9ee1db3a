"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import llamahybrid.engine.activation

os.environ.setdefault("LLAMAHYBRID_ENGINE", "stock")  # chosen, whatever was built on this machine
os.environ.setdefault("LLAMAHYBRID_COSTS", "off")  # each test measures for itself
# Tiny models: a second thread costs more than it saves, and far more where it waits for a busy core.
os.environ.setdefault("OMP_THREAD_LIMIT", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

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


@pytest.fixture(scope="session")
def lose_cells() -> Callable[[Any, int, int], None]:
    """`lose_cells(ctx, a, b)`: the attention cells of [a, b) go, and the positions do not show it.

    Through the second sequence, because a patched library refuses to cut a hole into a hybrid.
    """
    from llama_cpp import llama_cpp as native

    def lose(ctx: Any, start: int, end: int) -> None:
        memory = native.llama_get_memory(ctx)
        for first, last in ((0, start), (end, -1)):
            native.llama_memory_seq_cp(memory, 0, 1, first, last)
        native.llama_memory_seq_rm(memory, 0, -1, -1)
        native.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        native.llama_memory_seq_rm(memory, 1, -1, -1)

    return lose


_NATIVE = (
    "campaigns",
    "capi",
    "cli/test_chat.py",
    "differential",
    "engine/test_loaded.py",
    "evaluate",
    "memory",
    "patches",
    "request",
    "speculation",
    "test_examples.py",
    "test_llama.py",
    "test_tiny.py",
    "tiny",
    "upstream",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs llama.cpp as `native`: such tests run once per engine, all others once."""
    here = Path(__file__).parent
    for item in items:
        parts = item.path.relative_to(here).parts
        if parts[0] in _NATIVE or "/".join(parts[:2]) in _NATIVE:
            item.add_marker("native")


def pytest_report_header() -> str:
    """Which engine this run is about."""
    return f"engine: {os.environ['LLAMAHYBRID_ENGINE']}"
