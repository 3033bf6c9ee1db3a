"""Planted regressions: `llamahybrid check` names each, and passes a sound cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.harness import directed
from llamahybrid.harness.report import Report
from llamahybrid.harness.targets.base import ModelFile
from llamahybrid.harness.targets.choice import target
from tests.conftest import TinyModel
from tests.harness.fake_server import FakeServer

BROKEN = Path(__file__).parent / "broken.py"

NAMES = {
    "LongerNonPrefix": ("llama", "restores-a-prefix"),
    "TailStays": ("llama", "cuts-the-tail"),
    "StalePlane": ("qwen35", "rolls-back-to-its-position"),
    "OthersAttention": ("llama", "own-attention"),
    "NeverHits": ("llama", "hits"),
    "SaltsTogether": ("llama", "salt-kept-apart"),
    "Grows": ("llama", "memory-flat"),
    "SaysMore": ("llama", "reports-what-it-reused"),
}


def _checked(folder: Path, *arguments: str) -> tuple[int, dict[str, str]]:
    """`llamahybrid check --quick ...`: its exit status, and the outcome of each verdict."""
    path = folder / "report.json"
    done = CliRunner().invoke(app, ["check", "--quick", "--json", str(path), *arguments])
    assert path.exists(), done.output
    report = Report.read(path)
    (checked,) = report.targets
    assert checked.error is None
    verdicts = [verdict for each in checked.workloads for verdict in each.verdicts]
    return done.exit_code, {verdict.name: verdict.outcome for verdict in verdicts}


@pytest.mark.parametrize("name", NAMES)
def test_directed_probe_finds_its_planted_regression(name: str, tiny_model: TinyModel) -> None:
    arch, fault = NAMES[name]
    for kind, outcome in ((name, "bad"), ("Sound", "ok")):
        on = target(f"class:{BROKEN}:{kind}")
        try:
            with on.open(ModelFile(arch, tiny_model(arch)), directed.SHAPE) as session:
                if fault == "memory-flat":
                    found = directed.memory(session)
                else:
                    (probe,) = (each for each in directed.PROBES if each.name == fault)
                    found = directed.run(session, probe, set())
        finally:
            on.close()
        assert {verdict.name: verdict.outcome for verdict in found.verdicts} == {fault: outcome}


@pytest.mark.parametrize(
    "name", ["StalePlane", *(pytest.param(n, marks=pytest.mark.full) for n in NAMES if n != "StalePlane")]
)
def test_check_names_the_planted_regression_and_no_other(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    arch, fault = NAMES[name]
    status, found = _checked(tmp_path, "--model", str(tiny_model(arch)), "--on", f"class:{BROKEN}:{name}")
    assert {each for each, outcome in found.items() if outcome == "bad"} == {fault}
    assert status == 1


@pytest.mark.full
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_check_passes_a_sound_cache(arch: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    status, found = _checked(tmp_path, "--model", str(tiny_model(arch)), "--on", f"class:{BROKEN}:Sound")
    assert set(found.values()) == {"ok"}, found
    assert status == 0


@pytest.mark.parametrize(
    ("faults", "bad", "untold"),
    [
        ({}, set(), {"memory-flat"}),
        ({"boasts": True}, {"reports-what-it-reused"}, {"memory-flat", "restores-a-prefix"}),
        ({"mixes_salts": True}, {"salt-kept-apart"}, {"memory-flat"}),
        ({"mixes_salts": True, "build": "llama-cpp-python 0.3.36"}, {"salt-kept-apart"}, {"memory-flat"}),
        ({"hides": True}, set(), {"hits", "cuts-the-tail", "salt-kept-apart", "memory-flat"}),
        ({"stale": True}, {"cuts-the-tail"}, {"memory-flat"}),
    ],
)
def test_server_is_judged_by_its_planted_fault(
    faults: dict[str, Any], bad: set[str], untold: set[str], tmp_path: Path
) -> None:
    with FakeServer(**faults) as server:
        status, found = _checked(tmp_path, "--on", server.url)
    hit = {name for name, outcome in found.items() if outcome == "bad"}
    assert bad <= hit, found
    if not ({"boasts", "stale"} & set(faults)):  # those two show in other verdicts, too
        assert hit == bad
    if "hides" in faults:
        assert set(found.values()) == {"cannot tell"}
    assert untold <= {name for name, outcome in found.items() if outcome == "cannot tell"}
    if not faults:
        assert found["hits"] == found["cuts-the-tail"] == found["salt-kept-apart"] == "ok"
    assert status == bool(bad)
