"""`llamahybrid record` and `llamahybrid replay`: requests of a program, written and played again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamahybrid import program as programs
from llamahybrid import tiny
from llamahybrid.cli.main import app
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Report
from llamahybrid.harness.traces.proxy import RecordingProxy
from llamahybrid.harness.traces.trace import read
from tests.harness.traces.said import MESSAGES, written

PROGRAM = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, verbose=False, n_threads=1, n_threads_batch=1)
say = [{"role": "user", "content": "The password of the harbour is Seagull, remember it well please."}]
for stream in (False, True):
    made = llm.create_chat_completion(say, max_tokens=6, temperature=0, stream=stream)
    list(made)
llm.create_completion("Who goes there?", max_tokens=4, temperature=0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("qwen35", tmp_path_factory.mktemp("model") / "qwen35.gguf")


@pytest.mark.parametrize("hashed", [pytest.param(False, marks=pytest.mark.full), True])
def test_program_is_recorded_and_replayed(hashed: bool, model: Path, tmp_path: Path) -> None:
    program, trace, report = tmp_path / "program.py", tmp_path / "t.jsonl", tmp_path / "report.json"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "llamahybrid", "record", "--out", str(trace)]
    command += [*(["--hash"] if hashed else []), "--", str(program), str(model)]
    subprocess.run(command, check=True, timeout=300)
    entries = read(trace)
    assert len(entries) == 3
    assert entries[1].cached == entries[1].total, "the same prompt came again"
    assert ("Seagull" in trace.read_text()) is not hashed
    assert [bool(entry.ask.messages) for entry in entries] == [True, True, False]
    if not hashed:
        assert len(entries[0].answer) == entries[0].ask.max_tokens
    arguments = ["replay", str(trace), "--model", str(model), "--json", str(report)]
    done = CliRunner().invoke(app, [*arguments, "--on", "stock" if hashed else "ours"])
    assert done.exit_code == 0, done.output
    (target,) = Report.read(report).targets
    found = target.workloads[0].requests
    assert [each.total for each in found] == [entry.total for entry in entries]
    assert hashed or found[1].cached == found[1].total
    assert found[1].chat == found[0].chat != found[2].chat
    assert {each.answer for each in found} == {"same"}


def test_replay_needs_a_model(tmp_path: Path) -> None:
    written(tmp_path / "t", Request(5, messages=MESSAGES))
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "t"), "--on", "stock"])
    assert done.exit_code == 1
    assert "--model" in done.output


@pytest.mark.parametrize("given", [[], ["--proxy", "http://127.0.0.1:1", "--", "program.py"]])
def test_record_takes_a_program_or_a_proxy_and_not_both(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingProxy, "serve", lambda self: None)  # nothing waits where both are taken
    done = CliRunner().invoke(app, ["record", "--out", str(tmp_path / "t"), "--port", "0", *given])
    assert done.exit_code == 2
    assert not (tmp_path / "t").exists()


def test_record_ends_as_the_program_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: Any, before: Any) -> int:
        assert list(argv) == ["program.py", "--out", "its own"]
        assert (tmp_path / "t").is_file(), "the file is there before the first model"
        return 3

    monkeypatch.setattr(programs, "run", run)
    command = ["record", "--out", str(tmp_path / "t"), "--", "program.py", "--out", "its own"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 3, done.output


@pytest.mark.parametrize("given", [["--proxy", "http://127.0.0.1:1"], ["--", "program.py"]])
def test_unwritable_trace_is_one_error_line(given: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["record", "--out", str(tmp_path / "no" / "t"), *given])
    assert done.exit_code == 1
    assert "No such file" in done.output
    assert "Traceback" not in done.output


def test_record_without_llama_cpp_reports_an_empty_recording(tmp_path: Path) -> None:
    program, trace = tmp_path / "program.py", tmp_path / "t"
    program.write_text("import os\nif os.fork() == 0:\n    raise SystemExit(3)\nos.wait()\n")
    command = [sys.executable, "-m", "llamahybrid", "record", "--out", str(trace), "--", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr == f"nothing was recorded: {program} has not imported llama_cpp\n"
    assert not trace.exists()
