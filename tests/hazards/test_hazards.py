"""The hazard suite: a runner that survives its children, and the reports. Verdicts: test_verdicts.py."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.errors import EngineError, UnknownArchitecture
from llamahybrid.hazards import report, runner
from llamahybrid.hazards.catalogue import PROBES, find
from llamahybrid.hazards.probe import QWEN35, NotApplicable, Outcome, Verdict


@pytest.fixture(scope="module")
def stock():
    """The library that llama-cpp-python brought along."""
    from llamahybrid.engine.activation import stock as folder

    return runner.library(folder())


def child(code, seconds=20.0):
    """What the runner makes of a child that runs `code`."""
    return runner.supervise([sys.executable, "-c", code], os.environ, seconds)


def test_a_gap_is_judged_by_the_range_of_a_clean_row():
    from llamahybrid.hazards.bench import gap

    row = np.array([0, 100], np.float32)
    assert gap(row + np.float32(0.005), row).exact
    assert not gap(row + np.float32(0.05), row).exact
    lost = gap(np.array([0, np.nan], np.float32), row)
    assert (lost.exact, lost.finite, lost.reported) == (False, False, None)
    with pytest.raises(NotApplicable):
        gap(row, np.ones(2, np.float32))


def test_every_probe_explains_itself():
    assert len({probe.id for probe in PROBES}) == len(PROBES)
    assert all(probe.title and probe.done and probe.site and probe.sound for probe in PROBES)


@pytest.mark.parametrize(
    ("name", "arch", "reason"),
    [
        ("rollback-twice", "jamba", "rollback planes"),
        ("remove-inner-range", "llama", "no hybrid"),
        ("cut-behind-window", "llama", "sliding window"),
        ("shift-under-m-rope", "llama", "M-RoPE"),
        ("pending-copy-saved", "mamba", "attention"),
    ],
)
def test_what_cannot_happen_is_not_applicable(stock, name, arch, reason):
    (result,) = runner.run([find(name)], stock, arch=arch)
    assert result.outcome.verdict is Verdict.NOT_APPLICABLE
    assert reason in result.outcome.detail


def test_a_crashing_child_is_a_result():
    outcome = child(
        "import os, sys; sys.stderr.write('a/b.cpp:7: last words\\n'); sys.stderr.flush(); os.abort()"
    )
    assert outcome == Outcome(Verdict.DIED, "SIGABRT: b.cpp:7: last words")


def test_a_hanging_child_is_killed():
    outcome = child("import time; time.sleep(600)", seconds=0.5)
    assert outcome.verdict is Verdict.DIED
    assert outcome.detail.startswith("hung")


@pytest.mark.parametrize("code", ["raise ValueError('no setup')", "pass", "print('{}')", "print('7')"])
def test_a_child_without_an_outcome_is_no_pass(code):
    assert child(code).verdict is Verdict.FAILED


def test_a_child_may_talk_before_its_outcome():
    outcome = Outcome(Verdict.WRONG, "said yes", 0.5)
    assert child(f"print('noise'); print({json.dumps(outcome.as_json())!r})") == outcome


def test_no_library_is_a_typed_error(tmp_path):
    for path in (tmp_path, tmp_path / "libllama.so"):
        with pytest.raises(EngineError, match="no libllama"):
            runner.library(path)


def test_a_file_that_is_no_library_is_a_typed_error(tmp_path):
    (tmp_path / "libllama.so").write_bytes(b"not a library")
    with pytest.raises(EngineError, match="cannot be loaded"):
        runner.library(tmp_path / "libllama.so")


def test_an_unknown_architecture_is_a_typed_error(stock):
    with pytest.raises(UnknownArchitecture):
        runner.run(PROBES[:1], stock, arch="nonsense")


MENDED = find("rollback-to-batch-start")


def made(verdict, detail="a\x1bb <&>", difference=0.25):
    return runner.Result(MENDED, QWEN35, Outcome(verdict, detail, difference), 0.5)


def test_json_and_junit_are_well_formed():
    library = runner.Library("/some/libllama.so", "CPU", {})
    some = [made(verdict) for verdict in Verdict]
    document = json.loads(json.dumps(report.as_json(some, library), allow_nan=False))
    assert [probe["verdict"] for probe in document["probes"]] == [verdict.value for verdict in Verdict]
    assert not document["sound"]
    assert {tuple(probe["patches"]) for probe in document["probes"]} == {MENDED.patches}
    suite = ET.fromstring(report.as_junit(some, library))
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6",
        "failures": "2",
        "errors": "1",
        "skipped": "1",
    }
    assert [len(case) for case in suite] == [1, 1, 2, 2, 2, 2]
    for case in suite:
        patches = [each.get("value") for each in case.findall("properties/property[@name='patch']")]
        assert tuple(patches) == MENDED.patches


def test_the_table_shows_text_as_it_is():
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.table([made(Verdict.WRONG, "cells[head].pos [red]")], "title"))
    shown = console.export_text()
    assert "cells[head].pos [red]" in shown
    assert " ".join(MENDED.patches) in shown


def test_the_command_fails_on_stock_and_writes_its_reports(stock, tmp_path):
    files = tmp_path / "a.json", tmp_path / "a.xml"
    arguments = ["hazards", "--lib", stock.path, "--json", str(files[0]), "--junit", str(files[1])]
    chosen = ["--probe", "rollback-one-batch", "--probe", "rollback-twice"]
    run = CliRunner().invoke(app, [*arguments, *chosen])
    assert run.exit_code == 1
    assert [probe["id"] for probe in json.loads(files[0].read_text())["probes"]] == chosen[1::2]
    assert ET.fromstring(files[1].read_text()).get("failures") == "1"
    assert CliRunner().invoke(app, [*arguments, *chosen, "--expect", "stock"]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, *chosen[:2]]).exit_code == 0


def test_the_command_names_what_it_does_not_know(tmp_path):
    run = CliRunner().invoke(app, ["hazards", "--lib", str(tmp_path)])
    assert run.exit_code == 1
    assert "no libllama" in run.output
    run = CliRunner().invoke(app, ["hazards", "--probe", "nonsense"])
    assert run.exit_code == 1
    assert "rollback-twice" in run.output
    assert CliRunner().invoke(app, ["hazards", "--expect", "patched"]).exit_code == 2
