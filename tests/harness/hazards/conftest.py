"""The results of all selected probes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

from llamahybrid.engine.bindings import stock
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.hazards.catalogue import PROBES

Results: TypeAlias = Mapping[tuple[str, object], runner.Result]


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
