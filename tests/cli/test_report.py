"""`llamahybrid report` and `compare`: a JSON report in other formats, and two of them."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.harness.report import Report
from tests.harness.reports import report, target, verdict, workload


def test_report_is_shown_or_written_in_each_format(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    report().write(file)
    shown = CliRunner().invoke(app, ["report", str(file)])
    assert shown.exit_code == 0
    assert "1 of 1 target without a fault." in shown.output
    outs = [tmp_path / name for name in ("r.html", "r.md", "r.xml")]
    options = [
        f"{option}={out}" for option, out in zip(("--html", "--markdown", "--junit"), outs, strict=True)
    ]
    written = CliRunner().invoke(app, ["report", str(file), *options])
    assert written.exit_code == 0, written.output
    starts = [out.read_text(encoding="utf-8")[:5] for out in outs]
    assert starts == ["<!doc", "## Pr", "<?xml"]


def test_file_that_is_no_report_is_one_error_line(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text('{"format": 99}')
    done = CliRunner().invoke(app, ["report", str(file)])
    assert done.exit_code == 1
    assert "reports of format 5" in done.output
    assert "Traceback" not in done.output


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
