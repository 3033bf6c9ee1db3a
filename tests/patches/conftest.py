"""Tests of the patches beside the hazard catalogue: they must fail on stock and pass on patched libraries.

Stock is the library of llama-cpp-python; patched is the folder that `LLAMAHYBRID_TEST_LIB` names. A run tests
one of them. A test needs the patch that its file is named after, its case's (`number`, or its probe's) and
those of the mark `needs`; on a library that lacks one it must fail, which only the full suite (`-m ""`) runs.

The catalogue (`llamahybrid.harness.hazards`, tests/harness/hazards) has what users meet, one situation a
probe. Here is what it cannot show: functions that only the patches have (0014 to 0016), what an operation
allocates (heap.py: 0009, 0015, 0017), models that `tiny` does not make (more_models.py: 0025, 0028, and the
catalogue's probes in test_more_models.py), and one architecture's own rules (0012, 0019, 0024).
tests/llama_server has what takes a server: 0020 to 0022. test_programs.py runs the tests that go upstream
with a patch (patches/tests).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import more_models
import pytest

from llamahybrid.engine.bindings import stock
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.hazards.catalogue import find
from llamahybrid.harness.hazards.effect import Effect
from tests.lab.patched_library import PATCHED, marks

HERE = Path(__file__).parent
MISSING = 77
"""Exit status of a probe whose function the library has not (capi.py, which loads the library)."""

Probe: TypeAlias = Callable[[str], Any]
Run: TypeAlias = Callable[[Probe, Path], Any]


class Died(AssertionError):
    """The child process was killed by the library it ran."""


def _environment(folder: str) -> dict[str, str]:
    """A child's environment that loads the libraries in `folder`, or stock ones when it is empty."""
    quiet = {"GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **quiet, "LLAMAHYBRID_ENGINE": folder or "stock"}


def _run(folder: str, probe: Probe, model: Path) -> Any:
    child = subprocess.run(
        [sys.executable, HERE / "capi.py", probe.__module__.rpartition(".")[2], probe.__name__, model],
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if child.returncode < 0:
        raise Died(f"{probe.__name__} died of signal {-child.returncode}: {child.stderr[-400:]}")
    assert child.returncode != MISSING, child.stderr
    if child.returncode:
        raise RuntimeError(f"{probe.__name__} failed: {child.stderr[-2000:]}")
    return json.loads(child.stdout)


@pytest.fixture(scope="session")
def more_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`more_model(arch)`: the path of one of `more_models.SPECS`, made once, beside a draft for gemma4."""
    folder = tmp_path_factory.mktemp("more")
    more_models.make_assistant(folder / "assistant.gguf")

    @cache
    def make(arch: str) -> Path:
        return more_models.make(arch, folder / f"{arch}.gguf")

    return make


_UNDER_TEST = [pytest.param(PATCHED, id="patched" if PATCHED else "stock")]
_FAIL_ON_STOCK = {"run", "catalogued", "libraries"}
_PASS_ON_STOCK = {"run_both"}


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect those tests to fail whose patches the library under test has not.

    On stock they are for the full suite, and so are those that pass there: the hazard catalogue shows each
    fault of stock quickly.
    """
    for item in items:
        if item.path.parent != HERE:
            continue
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & (_FAIL_ON_STOCK | _PASS_ON_STOCK):
            item.add_marker("patched")
        if fixtures & _PASS_ON_STOCK and not PATCHED:
            item.add_marker("full")
        if fixtures & _FAIL_ON_STOCK:
            numbers = _patches(item)
            if not numbers:
                raise pytest.UsageError(f"{item.nodeid} names no patch, and is to fail without one")
            for mark in marks(numbers):
                item.add_marker(mark)


def _patches(item: pytest.Item) -> set[str]:
    """The numbers of the patches that a test is about."""
    case = item.callspec.params if hasattr(item, "callspec") else {}
    numbers = {number for mark in item.iter_markers("needs") for number in mark.args}
    if named := re.match(r"test_(\d{4})_", item.path.name):
        numbers.add(named.group(1))
    if "number" in case:
        numbers.add(case["number"])
    if "probe_id" in case:
        numbers.update(find(case["probe_id"]).patches)
    return numbers


@pytest.fixture(params=_UNDER_TEST)
def run(request: pytest.FixtureRequest) -> Run:
    """`run(probe, model)`: what the probe returns in a process of its own with this library."""

    return lambda probe, model: _run(request.param, probe, model)


@pytest.fixture(params=_UNDER_TEST)
def catalogued(request: pytest.FixtureRequest) -> Callable[[str, Path], Effect]:
    """`catalogued(id, model)`: the outcome of the catalogue's probe of this id with this library."""
    library = runner.library(Path(request.param) if request.param else stock())
    return lambda name, model: runner.run_on(model, find(name), library, seconds=120)


@pytest.fixture(params=_UNDER_TEST)
def libraries(request: pytest.FixtureRequest) -> Path:
    """The folder of the libraries under test."""
    folder = Path(request.param) if request.param else stock()
    assert folder is not None
    return folder


@pytest.fixture(params=_UNDER_TEST)
def run_both(request: pytest.FixtureRequest) -> Run:
    """`run` for what stock does right too, and a patch must not break."""
    return lambda probe, model: _run(request.param, probe, model)
