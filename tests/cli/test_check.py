"""`llamahybrid check`: options and exit status; the run itself is made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.engine.process import Progress
from llamahybrid.harness import check as whole
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.report import Report, Verdict
from llamahybrid.harness.targets.choice import target as target_of
from llamahybrid.harness.targets.local import LocalTarget
from tests.harness.reports import report, target, verdict, workload

URL = "http://127.0.0.1:1"


class Pretend:
    """Stands in for `Check`: remembers what it was to run, and answers with a report."""

    asked: Sequence[Any] = ()
    last: Pretend
    minutes: float | None
    answer: Report

    def __init__(self, *asked: Any, progress: Progress) -> None:
        Pretend.asked, Pretend.last = asked, self

    def run(self) -> Report:
        return Pretend.answer


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> type[Pretend]:
    monkeypatch.setattr(whole, "Check", Pretend)
    Pretend.answer = report()
    return Pretend


def checked(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", *map(str, arguments)])
    return done.exit_code, done.output


def test_check_fails_on_a_bad_verdict_or_an_error(pretend: type[Pretend], tmp_path: Path) -> None:
    assert checked("--on", URL)[0] == 0
    bad = target("ours", workload(verdicts=(verdict("exact", "bad"),)))
    for found in (bad, target("ours", error="it died")):
        pretend.answer = report(target("stock"), found)
        assert checked("--on", URL, "--json", tmp_path / "x.json")[0] == 1
        assert Report.read(tmp_path / "x.json") == pretend.answer, "it is written all the same"


def test_check_of_a_url_needs_no_model(pretend: type[Pretend], tmp_path: Path) -> None:
    checked("--on", URL)
    assert pretend.asked[1] == []
    (tmp_path / "x.gguf").touch()
    checked("--on", URL, "--model", tmp_path / "x.gguf", "--n-gpu-layers", 3, "--threads", 7)
    (model,) = pretend.asked[1]
    options = {"n_threads": 7, "n_threads_batch": 7, "n_gpu_layers": 3}
    assert (model.name, model.options) == ("x.gguf", options)
    assert pretend.last.minutes == 5
    checked("--on", URL, "--minutes", 0)
    assert pretend.last.minutes is None
    checked()
    assert [each.name for each in pretend.asked[0]] == ["ours"]
    assert pretend.last.minutes is None, "tiny models have no limit"
    checked("--on", "stock", "--on", "ours")
    assert [each.name for each in pretend.asked[0]] == ["stock", "ours"]


def test_stopped_check_shows_what_it_found(pretend: type[Pretend], tmp_path: Path) -> None:
    pretend.answer = replace(report(target("ours")), complete=False)
    status, said = checked("--on", URL, "--json", tmp_path / "x.json")
    assert status == 130
    assert "the run was stopped before its end; so far: 1 of 1 target" in said
    assert Report.read(tmp_path / "x.json") == pretend.answer


def test_hazards_are_run_on_the_loaded_library_on_request(
    pretend: type[Pretend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdicts(path: str) -> tuple[Verdict, ...]:
        return (verdict("hazard:x", detail=path),)

    monkeypatch.setattr(runner, "verdicts", verdicts)
    stock = target_of("stock")
    assert isinstance(stock, LocalTarget)
    stock.library = "/a/libllama.so"
    checked("--on", URL)
    assert pretend.asked[3](stock) == ()
    checked("--on", URL, "--hazards")
    assert [each.detail for each in pretend.asked[3](stock)] == ["/a/libllama.so"]
    assert pretend.asked[3](target_of(URL)) == (), "a server brings a library of its own"
    assert pretend.asked[3](target_of("ours")) == (), "one that never opened has told of no library"


def test_unwritable_report_is_refused_before_the_run(pretend: type[Pretend], tmp_path: Path) -> None:
    pretend.asked = ()
    status, said = checked("--on", URL, "--json", tmp_path / "none" / "x.json")
    assert status == 1
    assert said.startswith("error: ")
    assert not pretend.asked, "before anything ran"
    status, said = checked("--on", URL, "--json", "/dev/full")
    assert status == 1
    assert "without a fault" in said, "the run is not lost"
    assert said.splitlines()[-1].startswith("error: ")


def test_unknown_workload_is_refused_with_a_list() -> None:
    status, said = checked("--on", URL, "--workload", "nothing")
    assert status == 1
    assert "thinking stripped" in said
