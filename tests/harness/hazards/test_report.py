"""What the probes found, as a table, as JSON and as JUnit; and when that is a pass."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest
from rich.console import Console

from llamahybrid.harness.hazards import report, runner
from llamahybrid.harness.hazards.case import QWEN35, Probe
from llamahybrid.harness.hazards.catalogue import PROBES, find
from llamahybrid.harness.hazards.outcome import Outcome, Verdict

MENDED = find("rollback-to-batch-start")
LIBRARY = runner.Library("/some/libllama.so", "CPU", {})


def made(verdict: Verdict, detail: str = "a\x1bb <&>", probe: Probe = MENDED) -> runner.Result:
    return runner.Result(probe, QWEN35, Outcome(verdict, detail, 0.25), 0.5)


def terminal(width: int = 200) -> Console:
    return Console(width=width, record=True, file=open(os.devnull, "w"))


def test_json_and_junit_are_well_formed() -> None:
    some = [made(verdict) for verdict in Verdict]
    document = json.loads(json.dumps(report.as_json(some, LIBRARY), allow_nan=False))
    assert [probe["verdict"] for probe in document["probes"]] == [verdict.value for verdict in Verdict]
    assert not document["sound"]
    assert {tuple(probe["patches"]) for probe in document["probes"]} == {MENDED.patches}
    suite = ET.fromstring(report.as_junit(some, LIBRARY))
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


def test_files_name_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    under_test = runner.Library("/home/ada/bin/libllama.so", "CPU", {})
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    monkeypatch.setattr(report, "library", lambda path: under_test)
    monkeypatch.setattr(report, "run", lambda *_, **__: [made(Verdict.FAILED, "no /home/ada/bin/libggml.so")])
    json_file, junit_file = tmp_path / "r.json", tmp_path / "r.xml"
    report.hazards(None, json=json_file, junit=junit_file, console=terminal())
    for file in (json_file, junit_file):
        assert "/home/ada" not in file.read_text()
        assert "~/bin/libllama.so" in file.read_text()
        assert "no ~/bin/libggml.so" in file.read_text()


def test_the_table_shows_text_as_it_is() -> None:
    console = terminal()
    console.print(report.table([made(Verdict.WRONG, "cells[head].pos [red]")], "title"))
    shown = console.export_text()
    assert "cells[head].pos [red]" in shown
    assert " ".join(MENDED.patches) in shown


def test_names_and_verdicts_are_whole_at_80_columns() -> None:
    console, folded = terminal(80), "a_word_of_a_symbol_that_no_line_of_80_columns_can_hold_beside_two_names"
    some = [made(verdict, folded, probe) for probe, verdict in zip(PROBES, cycle(Verdict), strict=False)]
    console.print(report.table(some, "hazards of /a/folder/too/long/for/one/line/of/80/columns/lib.so"))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    lines = [line.split() for line in shown.splitlines()]
    for result in some:
        words = [result.probe.id, *result.outcome.verdict.value.split()]
        assert words in [line[: len(words)] for line in lines]
    assert shown.replace("\n", "").replace(" ", "").count(folded) == len(some)


def test_the_summary_counts_what_there_was() -> None:
    some = [made(Verdict.DIED), made(Verdict.WRONG), made(Verdict.EXACT), made(Verdict.WRONG)]
    assert report.summary(some) == "1 exact, 2 silently wrong, 1 process died"


@pytest.mark.parametrize(
    ("verdict", "expect_stock", "passed"),
    [
        (Verdict.WRONG, False, False),  # what stock does there
        (Verdict.WRONG, True, True),
        (Verdict.EXACT, False, True),
        (Verdict.EXACT, True, False),
        (Verdict.FAILED, False, False),
        (Verdict.NOT_APPLICABLE, False, False),  # nothing was tried
    ],
)
def test_a_pass_is_a_sound_library_or_the_one_that_was_expected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: Verdict, expect_stock: bool, passed: bool
) -> None:
    def run(probes: Sequence[Probe], under_test: runner.Library, **_: object) -> list[runner.Result]:
        assert under_test is LIBRARY
        return [made(verdict, probe=probe) for probe in probes]

    monkeypatch.setattr(report, "run", run)
    monkeypatch.setattr(report, "library", lambda path: LIBRARY)
    console, file = terminal(), tmp_path / "x.json"
    names = (MENDED.id, "rollback-twice")
    assert report.hazards(None, None, names, json=file, expect_stock=expect_stock, console=console) is passed
    assert tuple(probe["id"] for probe in json.loads(file.read_text())["probes"]) == names
    known = expect_stock and not passed
    said = "rollback-twice: exact, stock is known as silently wrong"
    assert (said in console.export_text()) is known


def test_where_nothing_applies_nothing_is_known() -> None:
    out = made(Verdict.NOT_APPLICABLE)
    assert report.summary([out, out]) == "2 not applicable: nothing is known"
    assert report.as_json([out], LIBRARY)["sound"] is False
    assert report.as_json([out, made(Verdict.REFUSED)], LIBRARY)["sound"] is True


def test_files_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    nowhere = tmp_path / "none" / "x"
    for files in ({"json": nowhere}, {"junit": nowhere}):
        with pytest.raises(FileNotFoundError, match="nothing can be written there"):
            report.hazards(tmp_path / "no library", console=terminal(), **files)


def test_what_was_found_is_shown_though_it_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "library", lambda path: LIBRARY)
    monkeypatch.setattr(report, "run", lambda *_, **__: [made(Verdict.WRONG)])
    for files in ({"json": Path("/dev/full")}, {"junit": Path("/dev/full")}):
        console = terminal()
        with pytest.raises(OSError, match="No space left"):
            report.hazards(None, console=console, **files)
        assert "1 silently wrong" in console.export_text()
