"""Models that tests of requests open, and what upstream says to the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.core import slots
from tests.lab.gguf_edits import with_template
from tests.request.asking import Stock

OPTIONS: dict[str, Any] = {
    **{"n_ctx": 1024, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1},
    **{"seed": 7, "verbose": False, "swa_full": False},
}


@pytest.fixture
def opened(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """`opened(arch, cls=Llama, **arguments)`: a tiny model, closed when the test ends.

    "gemma3" has a window of 16 tokens and keeps no more than it; "gemma3-full" keeps all.
    """
    with ExitStack() as stack:

        def open_one(arch: str = "qwen35", cls: Any = Llama, **more: Any) -> Any:
            name = arch.removesuffix("-full")
            path = tiny_model(name, **({"window": 16} if name == "gemma3" else {}))
            options = {**OPTIONS, "swa_full": arch != name, **more}
            return stack.enter_context(closing(cls(str(path), **options)))

        yield open_one


@pytest.fixture
def stock(opened: Callable[..., Any]) -> Callable[..., Stock]:
    """`stock(arch, **arguments)(prompt, n)`: the greedy answer of a fresh context of upstream's."""
    known: dict[str, Stock] = {}

    def of(arch: str = "qwen35", **more: Any) -> Stock:
        key = repr((arch, sorted(more.items())))
        if key not in known:
            known[key] = Stock(opened(arch, llama_cpp.Llama, **more))
        return known[key]

    return of


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that nobody advances makes room at once, not after a second."""
    monkeypatch.setattr(slots, "LONG_PATIENCE", 0.01)
    monkeypatch.setattr(slots, "PATIENCE", 0.01)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that nobody advances keeps its place, however slow this machine is."""
    monkeypatch.setattr(slots, "LONG_PATIENCE", 600.0)
    monkeypatch.setattr(slots, "PATIENCE", 600.0)


@pytest.fixture
def templated(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`templated(template, cls=Llama, arch="qwen35", **more)`: a model with this chat template."""
    with ExitStack() as stack:

        def open_one(template: str, cls: Any = Llama, arch: str = "qwen35", **more: Any) -> Any:
            path = with_template(tiny_model(arch), tmp_path / f"{arch}.gguf", template)
            options = {"n_ctx": 512, "n_threads": 1, "verbose": False, **more}
            return stack.enter_context(closing(cls(str(path), **options)))

        yield open_one
