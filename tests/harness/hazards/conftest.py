"""Benches on tiny models; and the probes that the selected tests are about, run all of them in one go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.capi.gguf import quiet
from llamahybrid.engine.bindings import stock
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.hazards.catalogue import PROBES
from llamahybrid.harness.hazards.context import Context
from llamahybrid.harness.hazards.model import Bench, lib
from tests.harness.hazards.verdicts import Results


class FreedBench(Bench):
    """A bench whose contexts can be freed."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.made: list[Context] = []

    def context(self, **params: Any) -> Context:
        """A fresh context, remembered."""
        self.made.append(super().context(**params))
        return self.made[-1]

    def free(self) -> None:
        """Free the model and its contexts."""
        for context in self.made:
            lib.llama_free(context.ctx)
        lib.llama_model_free(self.model)


@pytest.fixture
def bench(tiny_model: Callable[..., Path]) -> Iterator[Callable[[str], Bench]]:
    """`bench(arch)`: a bench for a tiny model, gone after the test, as is its way with the library's log."""
    made: list[FreedBench] = []

    def make(arch: str) -> Bench:
        made.append(FreedBench(str(tiny_model(arch))))
        return made[-1]

    with quiet():
        yield make
        for each in made:
            each.free()


@pytest.fixture(scope="session")
def stock_library() -> runner.Library:
    """The library that llama-cpp-python brought along."""
    return runner.library(stock())


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    """What each probe of the selected tests found, on every model that it knows, with this run's library."""
    asked = {
        item.callspec.params["probe"].id
        for item in request.session.items
        if hasattr(item, "callspec") and "results" in getattr(item, "fixturenames", ())
    }
    patched = os.environ.get("LLAMAHYBRID_TEST_LIB", "")
    library = runner.library(Path(patched) if patched else stock())
    probes = [probe for probe in PROBES if probe.id in asked]
    found = runner.run(probes, library, known=True, seconds=240)
    return {(each.probe.id, each.model): each for each in found}
