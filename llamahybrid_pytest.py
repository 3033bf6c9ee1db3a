"""The pytest plugin: fixtures that run the harness on a target.

It stands beside the package, not in it: pytest loads it in every session of whoever has llamahybrid, and to
import llamahybrid decides which library llama_cpp loads. That must happen to those alone who ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from llamahybrid.harness.report import Report
    from llamahybrid.harness.targets.base import Target


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is under test."""
    group = parser.getgroup("llamahybrid", "prefix reuse (llamahybrid)")
    group.addoption(
        "--llamahybrid-target",
        default="ours",
        metavar="TARGET",
        help="stock, stock+ram, stock+disk, ours, class:FILE.py:NAME, server:PATH, or a URL (default: ours)",
    )
    group.addoption(
        "--llamahybrid-lib",
        type=Path,
        metavar="PATH",
        help="a libllama, or its folder, for targets that are Python (default: the one llama_cpp loads)",
    )


@pytest.fixture(scope="session")
def llamahybrid_lib(pytestconfig: pytest.Config) -> Path | None:
    """What `--llamahybrid-lib` names; None: the library that llama_cpp loads by itself."""
    lib: Path | None = pytestconfig.getoption("--llamahybrid-lib")
    return lib


@pytest.fixture(scope="session")
def llamahybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`llamahybrid_model(arch, **options)`: a random model of some hundred kilobytes, made once a session.

    `options` are those of `llamahybrid.tiny.make`: window, layers, embd, vocab and so on.
    """
    made: dict[tuple[object, ...], Path] = {}

    def make(arch: str = "qwen35", **options: Any) -> Path:
        from llamahybrid import tiny

        key = (arch, *sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("llamahybrid")
            made[key] = tiny.make(arch, folder / f"{arch}.gguf", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def llamahybrid_target(pytestconfig: pytest.Config, llamahybrid_lib: Path | None) -> Iterator[Target]:
    """The target that `--llamahybrid-target` names, on the library of `--llamahybrid-lib`."""
    from llamahybrid.harness.targets.choice import target

    chosen = target(pytestconfig.getoption("--llamahybrid-target"), llamahybrid_lib)
    yield chosen
    chosen.close()


@pytest.fixture(scope="session")
def llamahybrid_check(
    llamahybrid_target: Target, llamahybrid_model: Callable[..., Path]
) -> Callable[..., Report]:
    """`llamahybrid_check(*workloads, arch="qwen35", model=None)`: a report of these workloads on the target.

    Directed probes of the cache are run, too. `model` is a GGUF file in place of a tiny one of `arch`.
    """

    def check(*workloads: str, arch: str = "qwen35", model: Path | None = None) -> Report:
        from llamahybrid.harness.check import WORKLOADS, Check
        from llamahybrid.harness.targets.base import ModelFile

        known = {workload.name: workload for workload in WORKLOADS}
        if unknown := [name for name in workloads if name not in known]:
            raise ValueError(f"no workload called {', '.join(unknown)}; there are: {', '.join(known)}")
        path = model or llamahybrid_model(arch)
        chosen = [known[name] for name in workloads]
        return Check([llamahybrid_target], [ModelFile(path.stem, path)], chosen).run()

    return check


@pytest.fixture(scope="session")
def llamahybrid_trace(
    llamahybrid_target: Target, llamahybrid_model: Callable[..., Path]
) -> Callable[..., Report]:
    """`llamahybrid_trace(path, arch="qwen35", model=None)`: a report of a recorded trace, played there.

    `llamahybrid record` writes traces; `model` is the one that it was recorded on.
    """

    def replayed(trace: Path, arch: str = "qwen35", model: Path | None = None) -> Report:
        from llamahybrid.harness.targets.base import ModelFile
        from llamahybrid.harness.traces.replay import replay

        path = model or llamahybrid_model(arch)
        return replay([Path(trace)], [llamahybrid_target], [ModelFile(path.stem, path)])

    return replayed
