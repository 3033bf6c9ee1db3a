"""Tiny models under test, and the results of all selected probes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from llamahybrid.capi.gguf import quiet
from llamahybrid.engine.bindings import stock
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.hazards.catalogue import PROBES
from llamahybrid.harness.hazards.context import Context
from llamahybrid.harness.hazards.model import ModelUnderTest, lib

Results: TypeAlias = Mapping[tuple[str, object], runner.Result]


class FreedModel(ModelUnderTest):
    """A model under test that can be freed with its contexts."""

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
def tested(tiny_model: Callable[..., Path]) -> Iterator[Callable[[str], ModelUnderTest]]:
    """`tested(arch)`: a tiny model under test, freed after the test."""
    made: list[FreedModel] = []

    def make(arch: str) -> ModelUnderTest:
        made.append(FreedModel(str(tiny_model(arch))))
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
    """Results of the selected tests' probes on all their models, with this run's library."""
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
