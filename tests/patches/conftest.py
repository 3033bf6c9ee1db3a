"""Tests of the patches beside the hazard catalogue: they must fail on stock and pass on patched libraries.

Stock is the library of llama-cpp-python; patched is the folder that `LLAMAHYBRID_TEST_LIB` names. A run tests
one of them. A test needs the patch that its file is named after, its case's (`number`, or its probe's) and
those of the mark `needs`; on a library that lacks one it must fail, which only the full suite (`-m ""`) runs.
The mark `right_on_stock` is for what stock does right, too, and a patch must not break. A test with the
argument `path`, a model that `capi.on` names, runs in a process of its own.

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
from inspect import signature
from pathlib import Path

import capi
import more_models
import pytest

from llamahybrid.engine.bindings import stock
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.hazards.catalogue import find
from llamahybrid.harness.hazards.effect import Effect
from tests.conftest import TinyModel
from tests.lab.patched_library import PATCHED, marks

HERE = Path(__file__).parent


class Failed(AssertionError):
    """A test failed, or died, in its process."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the argument `path` in a process of its own, on the library under test."""
    if pyfuncitem.path.parent != HERE or "path" not in pyfuncitem.fixturenames:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.function).parameters}
    quiet = {"GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, HERE / "capi.py", pyfuncitem.path.stem, pyfuncitem.originalname]
    child = subprocess.run(
        [*command, json.dumps(arguments)],
        env={**os.environ, **quiet, "LLAMAHYBRID_ENGINE": PATCHED or "stock"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if child.returncode == capi.SKIPPED:
        pytest.skip(child.stderr.strip())
    if child.returncode < 0 or child.returncode == capi.FAILED:
        raise Failed(f"exit status {child.returncode}: {child.stderr[-2000:]}")
    if child.returncode:
        raise RuntimeError(f"the situation was not reached: {child.stderr[-2000:]}")
    return True


@pytest.fixture
def path(request: pytest.FixtureRequest, tiny_model: TinyModel, more_model: Callable[[str], Path]) -> str:
    """The path of the model that `capi.on` names."""
    arch, sizes = request.param
    made = more_model(arch) if arch in more_models.NAMES else tiny_model(arch, **sizes)
    return str(made)


@pytest.fixture(scope="session")
def more_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`more_model(name)`: the path of one of `more_models.NAMES`, made once, beside a draft for gemma4."""
    folder = tmp_path_factory.mktemp("more")
    more_models.make_assistant(folder / "assistant.gguf")

    @cache
    def make(arch: str) -> Path:
        return more_models.make(arch, folder / f"{arch}.gguf")

    return make


_FAIL_ON_STOCK = {"path", "catalogued", "libraries"}


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect those tests to fail whose patches the library under test has not.

    On stock they are for the full suite, and so are those that pass there: the hazard catalogue shows each
    fault of stock quickly.
    """
    for item in items:
        if item.path.parent != HERE:
            continue
        if not _FAIL_ON_STOCK & set(getattr(item, "fixturenames", ())):
            continue
        item.add_marker("patched")
        if item.get_closest_marker("right_on_stock"):
            if not PATCHED:
                item.add_marker("full")
            continue
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


@pytest.fixture
def libraries() -> Path:
    """The folder of the libraries under test."""
    folder = Path(PATCHED) if PATCHED else stock()
    assert folder is not None
    return folder


@pytest.fixture
def catalogued(libraries: Path) -> Callable[[str, Path], Effect]:
    """`catalogued(id, model)`: the outcome of the catalogue's probe of this id with this library."""
    library = runner.library(libraries)
    return lambda name, model: runner.run_on(model, find(name), library, seconds=120)
