"""Benchmarks: all of them start; results as they write them become tables of the pages."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import clients, figures
from benchmarks.subjects import Subject
from llamahybrid.harness.report import Report, TargetFigures, Times, WorkloadFigures


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    return tmp_path


PROGRAMS = sorted(path.stem for path in (figures.ROOT / "benchmarks").glob("*.py"))


def test_every_benchmark_imports() -> None:
    code = f"import {', '.join(f'benchmarks.{name}' for name in PROGRAMS)}"
    run = subprocess.run([sys.executable, "-c", code], cwd=figures.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def played(subject: Subject, part: str, seed: int) -> dict[str, float]:
    """Numbers in place of measurements: `ours` has 2, the others 4, more tokens being better."""
    value = 2.0 if subject.name == "ours" else 4.0
    measures = {target.measure: value for target in clients.PARTS[part][1]}
    return measures | ({"tokens/s": 8.0 if subject.name == "ours" else 4.0} if part == "chats" else {})


def alone(subjects: Sequence[Subject], rounds: int) -> dict[str, list[dict[str, float]]]:
    return {each.name: [played(each, "alone", seed) for seed in range(rounds)] for each in subjects}


def arguments(results: Path, *parts: str) -> Namespace:
    there = {"model": Path("model.gguf"), "program": Path("llama-server"), "json": results / "clients.json"}
    return Namespace(parts=[*parts], clients=[1, 4, 8], rounds=2, threads=2, n_gpu_layers=None, **there)


def test_clients_are_measured_and_shown_by_their_number(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "played", played)
    monkeypatch.setattr(clients, "alone", alone)
    assert clients.main(arguments(results)) == 1, "0.5 is above the bound of a first token beside stock"
    table = figures.table("clients")
    assert "| chats, 1 client: tokens/s |  | 8 | 4 | 4 |" in table
    assert "| chats, 8 clients: first token, s |  | 2 | 4 | 4 |" in table
    assert "| alone: streamed, ms a token | 4 | 2 |  |  |" in table
    assert "Threads: 2, rounds: 2" in table


@pytest.mark.parametrize(("least", "status"), [(1.9, 0), (2.1, 1)])
def test_a_target_that_is_missed_is_told_of_by_the_exit_status(
    results: Path, monkeypatch: pytest.MonkeyPatch, least: float, status: int
) -> None:
    target = clients.Target("tokens/s", "ours", "llama-server", least=least)
    monkeypatch.setattr(clients, "played", played)
    monkeypatch.setitem(clients.PARTS, "chats", (("ours", "llama-server"), (target,)))
    assert clients.main(arguments(results, "chats")) == status


def test_a_run_that_ended_early_is_not_shown(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(subject: Subject, part: str, seed: int) -> dict[str, float]:
        if part == "first":
            raise KeyboardInterrupt
        return played(subject, part, seed)

    monkeypatch.setattr(clients, "played", died)
    monkeypatch.setattr(clients, "alone", alone)
    with pytest.raises(KeyboardInterrupt):
        clients.main(arguments(results))
    left = json.loads((results / "clients.json").read_text(encoding="utf-8"))
    assert [part["title"] for part in left["parts"]] == ["alone"]
    assert figures.table("clients").startswith("*To measure: `python -m benchmarks.clients")


@pytest.mark.parametrize(("name", "file"), [("ratios", "ratios-stock.json"), ("budgets", "budgets.json")])
def test_results_in_the_repository_become_tables(results: Path, name: str, file: str) -> None:
    found = json.loads((figures.ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
    (results / file).write_text(json.dumps(found | {"made": figures.DECODE_LOOP}), encoding="utf-8")
    assert len(figures.table(name).splitlines()) > 3
    (results / file).write_text(json.dumps(found | {"made": "2026-11-25"}), encoding="utf-8")
    assert figures.table(name).startswith("*To measure: "), "of an older decode loop"


def test_a_run_of_bench_becomes_a_table(results: Path) -> None:
    targets = [
        TargetFigures(
            name,
            name,
            {},
            (WorkloadFigures("chat", decoded=decoded, times=Times(ttft)), WorkloadFigures("x")),
        )
        for name, decoded, ttft in (("stock", 2000, 0.5), ("ours", 1000, 0.1))
    ]
    report = Report.now(targets, ["model"], settings={"n_threads": "2", "rounds": "3"})
    replace(report, made="2027-01-01T00:00:00+00:00").write(results / "bench-1.json")
    assert "| chat | 2,000 | 1,000 | 0.500 | 0.100 |" in figures.table("short")
    assert "model, threads: 2, rounds: 3, " in figures.table("short")
