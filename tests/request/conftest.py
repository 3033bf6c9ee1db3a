"""Models that several tests of requests open in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamahybrid.prompt_cache import Costs


@pytest.fixture
def open_unmeasured(open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`open_unmeasured(arch, **arguments)`: a model that never knows its costs, however small they are."""

    def opener(arch: str = "qwen35", **more: Any) -> Any:
        llm = open_model(arch, **{"n_batch": 32, **more})
        monkeypatch.setattr(llm.runner.meter, "costs", Costs)
        return llm

    return opener


@pytest.fixture
def open_slots(open_model: Callable[..., Any]) -> Callable[..., Any]:
    """`open_slots(arch, n_parallel, **arguments)`: a model that several requests run on at once."""

    def opener(arch: str = "qwen35", n_parallel: int = 2, **more: Any) -> Any:
        return open_model(arch, n_parallel=n_parallel, **{"n_ctx": 1024, "n_batch": 256, **more})

    return opener
