"""Planted regressions: `llamahybrid check` calls each by its own name, and a sound cache nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid import tiny
from llamahybrid.cli.main import app
from llamahybrid.evaluate.report import Report
from tests.evaluate.fake_server import FakeServer

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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: tiny.make(arch, folder / f"{arch}.gguf") for arch in ("llama", "qwen35")}


def _checked(folder: Path, *arguments: str) -> tuple[int, dict[str, str]]:
    """`llamahybrid check --quick ...`: its exit status, and the outcome of each verdict."""
    path = folder / "report.json"
    done = CliRunner().invoke(app, ["check", "--quick", "--json", str(path), *arguments])
    assert path.exists(), done.output
    report = Report.from_json(json.loads(path.read_text()))
    (target,) = report.targets
    assert target.error is None
    verdicts = [verdict for each in target.workloads for verdict in each.verdicts]
    return done.exit_code, {verdict.name: verdict.outcome for verdict in verdicts}


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_regression_is_called_by_its_name(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    arch, verdict = NAMES[name]
    status, found = _checked(tmp_path, "--model", str(models[arch]), "--on", f"class:{BROKEN}:{name}")
    assert {each for each, outcome in found.items() if outcome == "bad"} == {verdict}
    assert status == 1


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_nothing_is_said_of_a_sound_cache(arch: str, models: dict[str, Path], tmp_path: Path) -> None:
    status, found = _checked(tmp_path, "--model", str(models[arch]), "--on", f"class:{BROKEN}:Sound")
    assert set(found.values()) == {"ok"}, found
    assert status == 0


def test_a_server_that_reports_more_than_it_can_have_reused(tmp_path: Path) -> None:
    with FakeServer(boasts=True) as server:
        status, found = _checked(tmp_path, "--on", server.url)
    assert {name for name, outcome in found.items() if outcome == "bad"} >= {"reports-what-it-reused"}
    assert found["memory-flat"] == found["restores-a-prefix"] == "cannot tell"
    assert status == 1


def test_an_honest_server(tmp_path: Path) -> None:
    with FakeServer() as server:
        status, found = _checked(tmp_path, "--on", server.url)
    assert "bad" not in found.values(), found
    assert found["hits"] == found["cuts-the-tail"] == found["salt-kept-apart"] == "ok"
    assert status == 0


def test_a_server_that_hits_on_another_users_salt(tmp_path: Path) -> None:
    with FakeServer(mixes_salts=True) as server:
        _, found = _checked(tmp_path, "--on", server.url)
    assert {name for name, outcome in found.items() if outcome == "bad"} == {"salt-kept-apart"}


def test_a_server_that_hides_what_it_reused_is_not_judged(tmp_path: Path) -> None:
    with FakeServer(hides=True) as server:
        status, found = _checked(tmp_path, "--on", server.url)
    assert set(found.values()) == {"cannot tell"}, found
    assert status == 0


def test_a_server_whose_cache_changes_answers(tmp_path: Path) -> None:
    with FakeServer(stale=True) as server:
        _, found = _checked(tmp_path, "--on", server.url)
    assert found["cuts-the-tail"] == "bad"
