"""Traces are read as they were written, and malformed lines are refused with their number."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llamahybrid.errors import ReportError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.traces.trace import Entry, TraceWriter, read
from tests.harness.traces.said import MESSAGES, written


def test_trace_survives_its_file(tmp_path: Path) -> None:
    asks = [
        Request(7, tokens=(1, 2, 3), salt="a"),
        Request(8, messages=MESSAGES, tools=({"type": "function"},), seed=3),
    ]
    assert written(tmp_path / "t", *asks) == asks
    assert read(tmp_path / "t")[0] == Entry(0.5, asks[0], "an answer", (1, 2), 10, 3, 0.1, 0.05)


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "x\n", '{"kind": "llamahybrid trace", "format": 1}\n'])
def test_files_that_are_no_trace_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ReportError, match="t"):
        read(tmp_path / "t")


@pytest.mark.parametrize("line", ["{}", "[]", "nothing", '{"ask": {"tokens": ["x"]}}'])
def test_malformed_line_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    written(tmp_path / "t", Request(1, tokens=(1,)))
    with (tmp_path / "t").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ReportError, match="line 3"):
        read(tmp_path / "t")


def test_truncated_last_line_is_left_out(tmp_path: Path) -> None:
    written(tmp_path / "t", Request(1, tokens=(1,)))
    whole = (tmp_path / "t").read_text()
    (tmp_path / "t").write_text(whole + whole.splitlines()[1][:-5])
    assert len(read(tmp_path / "t")) == 1


def test_old_trace_stays_until_the_first_request(tmp_path: Path) -> None:
    (old,) = written(tmp_path / "t", Request(7, tokens=(1, 2, 3) * 100))
    writer = TraceWriter(tmp_path / "t", "test")
    assert [entry.ask for entry in read(tmp_path / "t")] == [old], "nothing was asked yet"
    with pytest.raises(OSError, match="another process"):
        TraceWriter(tmp_path / "t", "test")
    writer.add(Entry(0.5, Request(1, tokens=(9,))))
    writer.close()
    assert [entry.ask.tokens for entry in read(tmp_path / "t")] == [(9,)]
    TraceWriter(tmp_path / "t", "test").close()
    assert not read(tmp_path / "t"), "nothing was asked"


def test_full_disk_ends_the_trace_and_not_the_program(caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(Path("/dev/full"), "test")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            writer.add(Entry(0.5, Request(1, tokens=(1,))))
        writer.close()
    assert [record.message for record in caplog.records] == [
        "recording ends here, the trace is not complete: [Errno 28] No space left on device"
    ]
