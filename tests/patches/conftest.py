"""What the patches do that the hazard catalogue does not hold: it must fail on stock and pass on patched.

Stock is the library that llama-cpp-python brought along; patched is the folder that `LLAMAHYBRID_TEST_LIB`
names. One run is about one of them: stock without the variable, which proves that each test can fail.

The catalogue (`llamahybrid.hazards`, tests/hazards) has what users meet, one situation a probe. Here is what
it cannot show: functions that only the patches have (0014 to 0016), what an operation allocates (heap.py:
0009, 0015, 0017), models that `tiny` does not make (more_models.py: 0025, 0028, and the catalogue's probes
in test_more_models.py), and one architecture's own rules (0019, 0023, 0024). tests/llama_server has what
takes a server: 0020 to 0022.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import more_models
import pytest

from llamahybrid.engine.bindings import stock
from llamahybrid.hazards import runner
from llamahybrid.hazards.catalogue import find
from llamahybrid.hazards.outcome import Outcome

HERE = Path(__file__).parent
PATCHED = os.environ.get("LLAMAHYBRID_TEST_LIB", "")

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


_FAILS = pytest.mark.xfail(strict=True, raises=AssertionError, reason="what the patch is for")
_ENGINE = "patched" if PATCHED else "stock"


@pytest.fixture(params=[pytest.param(PATCHED, id=_ENGINE, marks=() if PATCHED else _FAILS)])
def run(request: pytest.FixtureRequest) -> Run:
    """`run(probe, model)`: what the probe returns in a process of its own with this library."""

    return lambda probe, model: _run(request.param, probe, model)


@pytest.fixture(params=[pytest.param(PATCHED, id=_ENGINE, marks=() if PATCHED else _FAILS)])
def catalogued(request: pytest.FixtureRequest) -> Callable[[str, Path], Outcome]:
    """`catalogued(id, model)`: what comes of the catalogue's probe of this id with this library."""
    library = runner.library(Path(request.param) if request.param else stock())
    return lambda name, model: runner.run_on(model, find(name), library, seconds=120)


@pytest.fixture(params=[pytest.param(PATCHED, id=_ENGINE)])
def run_both(request: pytest.FixtureRequest) -> Run:
    """`run` for what stock does right too, and a patch must not break."""
    return lambda probe, model: _run(request.param, probe, model)
