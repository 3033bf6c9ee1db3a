"""Reports survive their JSON files, and malformed ones are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.errors import ReportError
from llamahybrid.harness.report import (
    Report,
    RequestFigures,
    TargetFigures,
    Times,
    Verdict,
    WorkloadFigures,
)

REQUEST = RequestFigures(
    "edit", "0", 1, 120, 100, 90, 41, 0.25, 1.5, "same", "ab12", "history differs at token 100"
)
HIDDEN = RequestFigures("edit", "0", 2, None, None, None, None, None, 1.0, "unknown", "", None)
TIMES = Times(0.1, 20.0, 1 << 20)
WORKLOAD = WorkloadFigures(
    "edit", (REQUEST, HIDDEN), 40, 41, 1.025, 1.02, (Verdict("reuse", "ok", "1.03"),), times=TIMES
)
TARGET = TargetFigures("stock", "stock", {"llama-cpp-python": "0.3.36"}, (WORKLOAD,), (), None)
REPORT = Report("2026-01-02T03:04:05+00:00", {"system": "Linux"}, ("a.gguf",), (TARGET,))


def test_report_survives_its_file(tmp_path: Path) -> None:
    REPORT.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == REPORT


def _changed(change: Any) -> object:
    data = json.loads(json.dumps(REPORT.as_json()))
    request = data["targets"][0]["workloads"][0]["requests"][0]
    change(data, request)
    return data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d, r: d.update(format=1), "format 1"),
        (lambda d, r: d.update(format=True), "format"),
        (lambda d, r: d.pop("machine"), "machine"),
        (lambda d, r: d.update(more=1), "more"),
        (lambda d, r: r.update(total="120"), "requests.0.total"),
        (lambda d, r: r.update(total=True), "total"),
        (lambda d, r: r.update(seconds=float("nan")), "seconds"),
        (lambda d, r: r.update(seconds=10**400), "seconds|large"),
        (lambda d, r: r.update(answer="perhaps"), "answer"),
        (lambda d, r: d.update(targets={}), "targets"),
    ],
)
def test_malformed_reports_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(_changed(change)))
    with pytest.raises(ReportError, match=said):
        Report.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '"format"'])
def test_files_that_are_no_report_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=str(path)):
        Report.read(path)


def test_report_names_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    kind = "class:/home/ada/cache.py:Mine"
    target = TargetFigures("stock@/home/ada/bin", kind, {}, (), (), "no libllama at /home/ada/bin")
    Report("now", {}, (), (target,)).write(tmp_path / "r.json")
    assert "/home/ada" not in (tmp_path / "r.json").read_text()
    assert Report.read(tmp_path / "r.json").targets[0].name == "stock@~/bin"


def test_interrupted_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    REPORT.write(tmp_path / "r.json")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Report("later", {}, (), ()).write(tmp_path / "r.json")
    assert Report.read(tmp_path / "r.json") == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "nothing is left behind"
