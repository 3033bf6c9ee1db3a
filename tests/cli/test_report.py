"""`llamahybrid report`: a JSON report in other formats."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from llamahybrid.cli.main import app
from tests.harness.reports import report


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
    assert "reports of format 3" in done.output
    assert "Traceback" not in done.output
