"""`llamahybrid compare`: its exit status."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.harness.report import Report
from tests.harness.reports import report, target, verdict, workload


def compared(folder: Path, old: Report, new: Report, *options: str) -> tuple[int, str]:
    files = folder / "old.json", folder / "new.json"
    for made, file in zip((old, new), files, strict=True):
        made.write(file)
    done = CliRunner().invoke(app, ["compare", *map(str, files), *options])
    return done.exit_code, done.output


def test_compare_fails_on_a_regression_only(tmp_path: Path) -> None:
    bad = report(target("ours", workload(verdicts=(verdict("exact", "bad", "turn 3"), verdict()))))
    status, said = compared(tmp_path, report(), bad)
    assert status == 1
    assert "exact was ok, is bad: turn 3" in " ".join(said.split())
    assert compared(tmp_path, bad, report())[0] == 0
    assert compared(tmp_path, report(), report()) == (0, "nothing got better or worse\n")


def test_strict_compare_fails_on_missing_targets(tmp_path: Path) -> None:
    two, one = report(target("ours"), target("stock")), report(target("ours"))
    assert compared(tmp_path, two, one)[0] == 0
    assert compared(tmp_path, two, one, "--strict")[0] == 1


def test_damaged_report_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")])
    assert done.exit_code == 1
    assert done.output.startswith("error: ")
