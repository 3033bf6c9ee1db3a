"""Traces: what is recorded comes back, and what is no trace is refused by its line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.errors import ReportError
from llamahybrid.evaluate.targets.base import Ask
from llamahybrid.evaluate.traces.trace import Entry, TraceWriter, chats, read
from tests.evaluate.traces.said import MESSAGES, written


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    asks = [
        Ask(7, tokens=(1, 2, 3), salt="a"),
        Ask(8, messages=MESSAGES, tools=({"type": "function"},), seed=3),
    ]
    assert written(tmp_path / "t", *asks) == asks
    assert read(tmp_path / "t").entries[0] == Entry(0.5, asks[0], "an answer", (1, 2), 10, 3, 0.1, 0.05)


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "x\n", '{"kind": "llamahybrid trace", "format": 2}\n'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ReportError, match="t"):
        read(tmp_path / "t")


@pytest.mark.parametrize("line", ["{}", "[]", "nothing", '{"ask": {"tokens": ["x"]}}'])
def test_a_line_that_is_no_request_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    written(tmp_path / "t", Ask(1, tokens=(1,)))
    with (tmp_path / "t").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ReportError, match="line 3"):
        read(tmp_path / "t")


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    written(tmp_path / "t", Ask(1, tokens=(1,)))
    whole = (tmp_path / "t").read_text()
    (tmp_path / "t").write_text(whole + whole.splitlines()[1][:-5])
    assert len(read(tmp_path / "t").entries) == 1


def test_chats_are_told_apart_by_what_they_share() -> None:
    first, second = tuple(range(100)), tuple(range(200, 300))
    prompts = [
        first,
        second,
        (*first, 1, 2, 3),
        (*second, 5),
        tuple(range(50, 90)),
        (*first[:70], *range(500, 540)),
    ]
    assert chats([Entry(0.0, Ask(1, tokens=p)) for p in prompts]) == ["0", "1", "0", "1", "2", "0"]


@pytest.mark.parametrize("changes", [{"total": "10"}, {"at": None}, {"text": 3}, {"ttft": []}])
def test_a_figure_that_is_none_is_refused_by_its_line(changes: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path / "t", Ask(1, tokens=(1,)))
    head, line = (tmp_path / "t").read_text().splitlines()
    (tmp_path / "t").write_text(f"{head}\n{json.dumps({**json.loads(line), **changes})}\n")
    with pytest.raises(ReportError, match=f"line 2.*{next(iter(changes))}"):
        read(tmp_path / "t")


def test_a_hashed_trace_with_a_message_that_is_not_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "t", Ask(1, messages=MESSAGES))
    (tmp_path / "t").write_text((tmp_path / "t").read_text().replace('"hashed": false', '"hashed": true'))
    with pytest.raises(ReportError, match="line 2"):
        read(tmp_path / "t")


def test_a_trace_stays_until_the_next_one_begins(tmp_path: Path) -> None:
    (old,) = written(tmp_path / "t", Ask(7, tokens=(1, 2, 3) * 100))
    writer = TraceWriter(tmp_path / "t", "test")
    assert [entry.ask for entry in read(tmp_path / "t").entries] == [old], "nothing was asked yet"
    with pytest.raises(OSError, match="another process"):
        TraceWriter(tmp_path / "t", "test")
    writer.add(Entry(0.5, Ask(1, tokens=(9,))))
    writer.close()
    assert [entry.ask.tokens for entry in read(tmp_path / "t").entries] == [(9,)]
    TraceWriter(tmp_path / "t", "test").close()
    assert not read(tmp_path / "t").entries, "nothing was asked"


def test_a_full_disk_ends_the_trace_and_not_the_program(caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(Path("/dev/full"), "test")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            writer.add(Entry(0.5, Ask(1, tokens=(1,))))
        writer.close()
    assert [record.message for record in caplog.records] == [
        "recording ends here, the trace is not complete: [Errno 28] No space left on device"
    ]
