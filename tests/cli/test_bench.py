"""`llamahybrid bench`: its tables, its report and its exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.harness import bench
from llamahybrid.harness.bench import Bench
from llamahybrid.harness.report import Report, Times
from tests.harness.reports import report, target, workload

MEASURED = target("ours", workload("a chat", ratio=1.1, verdicts=(), times=Times(0.5, 20.0, 3 << 20)))
HIDDEN = target("http://x", workload("a chat", ratio=None, verdicts=(), times=Times()))
REPORT = report(MEASURED, HIDDEN, target("stock", error="a chat: it died"))


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (REPORT, 1),
        (replace(REPORT, targets=REPORT.targets[:2]), 0),
        (replace(REPORT, complete=False), 130),
    ],
)
def test_bench_writes_its_report_and_fails_on_a_failed_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Report, status: int
) -> None:
    seen: list[Bench] = []

    def run(self: Bench) -> Report:
        seen.append(self)
        self.progress("a", 0, 1)
        self.found(found)
        return found

    monkeypatch.setattr(bench.Bench, "run", run)
    model, out = tmp_path / "m.gguf", tmp_path / "out.json"
    model.write_bytes(b"GGUF")
    options = ["--clients", "2", "--threads", "3", "--json", str(out)]
    ran = CliRunner().invoke(app, ["bench", str(model), *options], env={"COLUMNS": "120"})
    assert ran.exit_code == status, ran.output
    assert [t.name for t in seen[0].targets] == ["stock", "stock+ram", "ours"]
    assert seen[0].clients == (2,)
    assert seen[0].models[0].options == {"n_threads": 3, "n_threads_batch": 3}
    assert Report.read(out) == found
    rows = [" ".join(line.replace("│", " ").split()) for line in ran.output.splitlines()]
    assert "a chat ours 1.10 same 0.500 s 20.0 3.0" in [*rows, *(f"a chat {row}" for row in rows)]
    assert "http://x ? same" in rows
    assert ("a chat: it died" in ran.output) is (status != 0)


def test_unknown_target_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    ran = CliRunner().invoke(app, ["bench", str(model), "--on", "nonsense"])
    assert ran.exit_code == 1
    assert "no target 'nonsense'" in ran.output
