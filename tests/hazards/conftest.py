"""Runs the probes that the selected tests are about, all of them in one go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamahybrid.engine.bindings import stock
from llamahybrid.hazards import runner
from llamahybrid.hazards.catalogue import PROBES
from tests.hazards.verdicts import Results


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
