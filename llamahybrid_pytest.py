"""The pytest plugin: fixtures that run the harness on a target.

The module is outside of the package: pytest loads it in every session, and an import of llamahybrid decides
which library llama_cpp loads, which only users of the fixtures want.
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
    """Add the options for target and library."""
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
    """The value of `--llamahybrid-lib`; None: the library that llama_cpp loads by itself."""
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
        from llamahybrid.harness.check import Check, workloads_called
        from llamahybrid.harness.targets.base import ModelFile

        chosen = workloads_called(workloads) if workloads else ()
        path = model or llamahybrid_model(arch)
        return Check([llamahybrid_target], [ModelFile(path.stem, path)], chosen).run()

    return check


@pytest.fixture(scope="session")
def llamahybrid_trace(
    llamahybrid_target: Target, llamahybrid_model: Callable[..., Path]
) -> Callable[..., Report]:
    """`llamahybrid_trace(path, arch="qwen35", model=None)`: a report of a recorded trace on the target.

    `llamahybrid record` writes traces; `model` is the one that it was recorded on.
    """

    def replayed(trace: Path, arch: str = "qwen35", model: Path | None = None) -> Report:
        from llamahybrid.harness.targets.base import ModelFile
        from llamahybrid.harness.traces.replay import Replay

        path = model or llamahybrid_model(arch)
        return Replay([llamahybrid_target], [ModelFile(path.stem, path)], [Path(trace)]).run()

    return replayed
