"""The chat in the terminal: commands, Ctrl-C, and the tokens reported after each turn."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from llamahybrid import Llama
from llamahybrid.cli import chat
from llamahybrid.cli.chat import PromptBar
from llamahybrid.cli.main import app
from llamahybrid.core.report import PromptProgress

pytestmark = pytest.mark.xdist_group("serial")
TinyModel = Callable[..., Path]


def run(model: Path, typed: str | bytes, *arguments: str) -> str:
    arguments = ("chat", str(model), "--threads", "1", "--max-tokens", "8", *arguments)
    result = CliRunner().invoke(app, arguments, input=typed, env={"COLUMNS": "40"})
    assert result.exit_code == 0, result.output
    return result.stdout


def reports(out: str) -> list[tuple[int, int, int]]:
    """(cached, of, decoded) of each turn's line."""
    found = re.findall(r"cached (\d+) of (\d+), decoded (\d+), first token after \d+\.\d\d s", out)
    return [(int(cached), int(total), int(decoded)) for cached, total, decoded in found]


def test_each_turn_reports_cached_and_decoded_tokens(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    lines = (
        "Hello there",
        "",
        "And \\",
        "again",
        "/retry",
        f"/save {file}",
        "/undo",
        f"/load {file}",
        "/retry",
        "/quit",
    )
    out = run(tiny_model("qwen35"), "\n".join((*lines, "never said")), "--system", "Be brief.")
    first, second, retried, loaded = found = reports(out)
    assert all(total == cached + decoded for cached, total, decoded in found)
    assert first[0] == 0 < second[0]
    assert retried == (second[1], second[1], 0), "another answer decodes no prompt token"
    assert loaded == retried
    messages = json.loads(file.read_bytes())
    assert [m["content"] for m in messages[:2]] == ["Be brief.", "Hello there"]
    assert messages[3]["content"] == "And \nagain"
    assert "5 messages saved" in out


def test_edited_message_reuses_the_common_prefix(tiny_model: TinyModel) -> None:
    out = run(tiny_model("qwen35"), "Hello there\nAnd again\n/undo\n/edit\nHello yours\n")
    first, second, edited = reports(out)
    assert edited[1] == first[1] < second[1]
    assert re.search(r"differs at token[^;]+ was ", out), "it spells where its history parts, on one line"


def test_scripted_input_may_have_any_bytes(tiny_model: TinyModel) -> None:
    script = b'caf\xe9 [/bold]\r\n/nonsense[/b]\n/system \x1b[2J\n/system\n"""\nopen'
    out = run(tiny_model("qwen35"), script)
    assert len(reports(out)) == 1
    assert "> " not in out.replace("was '<think>'", "")
    assert "no command /nonsense[/b]" in out
    assert "\x1b" not in out
    assert "not sent" in out


def test_failed_answer_keeps_the_chat_open(tiny_model: TinyModel, tmp_path: Path) -> None:
    out = run(tiny_model("qwen35"), f"{'word ' * 4000}\n/save {tmp_path}/c\nHello\n", "--n-ctx", "256")
    assert "exceed context window" in out
    assert "not answered" in out
    assert len(reports(out)) == 1
    assert len(json.loads((tmp_path / "c").read_bytes())) == 1, "the message is still there"


@pytest.mark.parametrize(
    ("pieces", "finish", "kept"),
    [
        (["<think>", "x</think>\n\nyes"], "stop", "yes"),
        (["<think>", "x"], "cancelled", None),
        (["x</think>"], "length", None),
        ([], "cancelled", None),
        ([], "stop", ""),
        (["so \x1b[2J", "far\r\n"], "cancelled", "so \x1b[2Jfar\r\n"),
    ],
)
def test_answer_is_kept_without_its_thinking(
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pieces: list[str],
    finish: str,
    kept: str | None,
) -> None:
    def answer(llm: Llama, **_: Any) -> Iterator[Any]:
        for piece in pieces:
            yield {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": finish}]}

    monkeypatch.setattr(Llama, "create_chat_completion", answer)
    out = run(tiny_model("qwen35"), f"said\n/save {tmp_path}/c\n")
    messages = json.loads((tmp_path / "c").read_bytes())
    assert [m["content"] for m in messages] == ["said", *([] if kept is None else [kept])]
    assert ("not answered" in out) == (kept is None)
    assert "\x1b[2J" not in out
    assert "\r" not in out


# -- in a terminal -----------------------------------------------------------------------------------


_IN_A_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C comes from here
from llamahybrid.cli import dialogue
dialogue.AGAIN_SECONDS = 60  # on a slow machine, too, a second Ctrl-C comes in time
from llamahybrid.cli.main import app
app()
"""


class Terminal:
    """`llamahybrid chat` on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str, term: str = "dumb") -> None:
        self.out = ""
        self._end, end = pty.openpty()
        command = [sys.executable, "-c", _IN_A_TERMINAL, "chat", *arguments, "--threads", "1"]
        env = {**os.environ, "TERM": term, "PYTHONUTF8": "1"}
        streams = {"stdin": end, "stdout": end, "stderr": end}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
        os.close(end)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, pattern: str, start: int = 0, seconds: float = 120) -> int:
        """Wait for the first match after `start` and return its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.out, start)):
            ready, _, _ = select.select([self._end], [], [], max(0, deadline - time.monotonic()))
            got = b""
            with suppress(OSError):  # it ended
                got = os.read(self._end, 65536) if ready else b""
            assert got, f"no {pattern!r} in {self.out[start:]!r}"
            self.out = re.sub(r"\x1b\[\?2004[hl]\r?", "", self.out + got.decode(errors="replace"))
        return found.end()

    def interrupt(self, pattern: str, start: int) -> int:
        """Ctrl-C at the prompt; again where readline missed one that came before it waited."""
        for _ in range(5):
            self.type("\x03")
            with suppress(AssertionError):
                return self.until(pattern, start, seconds=20)
        raise AssertionError(f"no {pattern!r} after Ctrl-C in {self.out[start:]!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(tiny_model: TinyModel) -> Iterator[Terminal]:
    terminal = Terminal(
        str(tiny_model("qwen35")), "--max-tokens", "8000", "--n-ctx", "16384", "--keep-thinking"
    )
    try:
        yield terminal
    finally:
        terminal.close()


def test_ctrl_c_ends_the_answer_and_then_the_program(terminal: Terminal) -> None:
    at = terminal.until("> $")
    terminal.type("Hello\n")
    at = terminal.until(r"Hello\s+.{40}", at)  # the answer has begun
    terminal.type("\x03\x03")  # impatiently: it ends the answer, not the program
    at = terminal.until(r"interrupted; cached 0 of \d+", at)
    at = terminal.until("> $", at)
    terminal.type("/retry\n")
    at = terminal.until(r"/retry\s+.{40}", at)
    terminal.type("\x03")
    at = terminal.until(r"interrupted; cached (\d+) of \1, decoded 0", at)
    at = terminal.until("> $", at)
    terminal.type('"""\nnever')
    at = terminal.until("never", at)
    at = terminal.interrupt(r"Ctrl-C again.*\s+> $", at)
    terminal.type("/system\n")
    at = terminal.until(r"system prompt: none\s+> $", at)
    terminal.interrupt(r"Ctrl-C again.*\s+> $", at)
    for _ in range(5):
        terminal.type("\x03")
        with suppress(subprocess.TimeoutExpired):  # readline missed one, see `interrupt`
            terminal.process.wait(20)
            break
    assert terminal.process.poll() == 0


def test_ctrl_d_leaves_and_edit_offers_the_last_message(terminal: Terminal) -> None:
    at = terminal.until("> $")
    terminal.type("Hello\n")
    at = terminal.until(r"Hello\s+.{40}", at)
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.until(r"(?s)interrupted; .*\n> $", at)
    terminal.type("/edit\n")
    at = terminal.until("edit> Hello" if chat.readline else "edit> ", at)
    terminal.type("\x15\n")  # nothing is left of it
    terminal.until(r"not changed\s+> $", at)
    terminal.type("\x04")
    assert terminal.process.wait(120) == 0


def test_long_prompt_has_a_progress_bar(tiny_model: TinyModel) -> None:
    terminal = Terminal(str(tiny_model("qwen35")), "--max-tokens", "4", "--n-ctx", "4096", term="xterm")
    try:
        at = terminal.until("> ")
        terminal.type(f"{'A word and another. ' * 45}\n")  # longer than a bar needs, and than one batch
        at = terminal.until(r"prompt .*\d+/\d+", at)
        terminal.until(r"cached 0 of \d+, decoded \d+", at)
    finally:
        terminal.close()


def test_progress_bar_needs_a_long_prompt_and_a_terminal() -> None:
    cases = ((2000, True, "xterm", True), (2000, False, "xterm", False), (100, True, "xterm", False))
    for total, is_terminal, kind, shown in (*cases, (2000, True, "dumb", False)):
        out = io.StringIO()
        bar = PromptBar(Console(file=out, force_terminal=is_terminal, width=80, _environ={"TERM": kind}))
        for processed in (0, total // 2, total):
            bar.show(PromptProgress(total, 0, processed, 1.0))
        assert (f"{total // 2}/{total}" in out.getvalue()) is bool(out.getvalue()) is shown


@pytest.mark.skipif(not chat.readline, reason="readline reads what is pasted")
def test_pasted_text_is_one_message(terminal: Terminal, tmp_path: Path) -> None:
    at = terminal.until("> $")
    terminal.type("\x1b[200~def f():\r    return 1\r\rf()\x1b[201~\r")
    at = terminal.until(r"(?s)f\(\)\r?\n.{60}", at)
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.until(r"(?s)interrupted; .*\n> $", at)
    terminal.type(f"/save {tmp_path}/c\n")
    terminal.until(r"saved to", at)
    (said, *_) = json.loads((tmp_path / "c").read_bytes())
    assert said["content"] == "def f():\n    return 1\n\nf()"


@pytest.mark.parametrize("answering", [False, True])
def test_sighup_ends_the_chat_in_order(terminal: Terminal, answering: bool) -> None:
    at = terminal.until("> $")
    if answering:
        terminal.type("Hello\n")
        terminal.until(r"Hello\s+.{40}", at)
    for _ in range(5):  # readline misses a signal that comes before it waits
        terminal.process.send_signal(signal.SIGHUP)
        with suppress(subprocess.TimeoutExpired):
            terminal.process.wait(60)
            break
    assert terminal.process.poll() == 128 + signal.SIGHUP


def test_closed_standard_input_is_one_error_line(tiny_model: TinyModel) -> None:
    command = [sys.executable, "-m", "llamahybrid", "chat", str(tiny_model("qwen35"))]
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    ended = subprocess.run(shell, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr == "error: standard input is closed, so there is nothing to answer\n"
