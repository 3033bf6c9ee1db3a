"""The chat in the terminal: what typed lines do, and what is said after each turn."""

from __future__ import annotations

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
from typer.testing import CliRunner

from llamahybrid.cli import asking, chat
from llamahybrid.cli.chat import turn_line, without_thinking
from llamahybrid.cli.dialogue import AGAIN_SECONDS
from llamahybrid.cli.main import app
from llamahybrid.request.report import RequestReport

TinyModel = Callable[..., Path]


def run(model: Path, typed: str | bytes, *arguments: str) -> str:
    arguments = ("chat", str(model), "--threads", "1", "--max-tokens", "8", *arguments)
    result = CliRunner().invoke(app, arguments, input=typed, env={"COLUMNS": "40"})
    assert result.exit_code == 0, result.output
    return result.stdout


def reports(out: str) -> list[tuple[int, int, int]]:
    """(cached, of, decoded) of each turn's line."""
    found = re.findall(r"cached (\d+) of (\d+), decoded (\d+), first token after \d+ ms", out)
    return [(int(cached), int(total), int(decoded)) for cached, total, decoded in found]


def test_each_turn_and_each_change_tells_what_was_reused(tiny_model: TinyModel, tmp_path: Path) -> None:
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
        "/quit",
    )
    out = run(tiny_model("qwen35"), "\n".join((*lines, "never said")), "--system", "Be brief.")
    first, second, retried, undone, loaded = found = reports(out)
    assert all(total == cached + decoded for cached, total, decoded in found)
    assert first[0] == 0 < second[0]
    assert retried == (second[1], second[1], 0), "another answer decodes no prompt token"
    assert first[1] < undone[1] < loaded[1]
    assert undone[0] > 0 < loaded[0]
    messages = json.loads(file.read_bytes())
    assert [m["content"] for m in messages[:2]] == ["Be brief.", "Hello there"]
    assert messages[3]["content"] == "And \nagain"
    assert "5 messages saved" in out


def test_an_edit_goes_on_from_what_is_the_same(tiny_model: TinyModel) -> None:
    out = run(tiny_model("qwen35"), "Hello there\nAnd again\n/undo\n/edit\nHello yours\n")
    first, second, _, edited = reports(out)
    assert edited[1] == first[1] < second[1]
    assert re.search(r"differs at token[^;]+ was ", out), "it spells where its history parts, on one line"


def test_a_script_has_no_prompts_and_may_have_any_bytes(tiny_model: TinyModel) -> None:
    script = b'caf\xe9 [/bold]\r\n/nonsense[/b]\n/system \x1b[2J\n/system\n"""\nopen'
    out = run(tiny_model("qwen35"), script)
    assert len(reports(out)) == 2
    assert "> " not in out.replace("was '<think>'", "")
    assert "no command /nonsense[/b]" in out
    assert "\x1b" not in out
    assert "not sent" in out


def test_an_answer_that_cannot_be_had_ends_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    out = run(tiny_model("qwen35"), f"{'word ' * 4000}\n/save {tmp_path}/c\nHello\n", "--n-ctx", "256")
    assert "exceed context window" in out
    assert "not answered" in out
    assert len(reports(out)) == 1
    assert len(json.loads((tmp_path / "c").read_bytes())) == 1, "the message is still there"


class Answers:
    """Stands for a model: these pieces are streamed, whatever is asked."""

    def __init__(self, *pieces: str, finish: str = "stop") -> None:
        self.pieces, self.outcome = pieces, asking.Outcome(finish=finish)
        self.asked: list[Any] = []

    def answer(self, messages: Any, _: int) -> Iterator[str]:
        self.asked.append(messages)
        yield from self.pieces

    def rearm(self) -> None: ...
    def close(self) -> None: ...


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
def test_what_is_kept_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, pieces: list[str], finish: str, kept: str | None
) -> None:
    from rich.console import Console

    model = Answers(*pieces, finish=finish)
    monkeypatch.setattr(chat, "Asking", lambda _: model)
    terminal = chat.TerminalChat(None, Console())  # type: ignore[arg-type]
    monkeypatch.setattr(terminal, "_typed", iter(["said", "/quit"]).__next__)
    terminal.run()
    assert [turn.answer for turn in terminal.dialogue.conversation.turns] == [kept]
    out = capsys.readouterr().out
    assert ("not answered" in out) == (kept is None)
    assert "\x1b[2J" not in out
    assert "\r" not in out


def test_thinking_is_left_out() -> None:
    assert without_thinking("a <think>") == "a <think>"
    assert without_thinking("<think>a</think>b</think>\nc") == "c"
    assert without_thinking("\n<think>a") is None


# -- in a terminal -----------------------------------------------------------------------------------


_IN_A_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C comes from here
from llamahybrid.cli.main import app
app()
"""


class Terminal:
    """`llamahybrid chat` on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.out = ""
        self._end, end = pty.openpty()
        command = [sys.executable, "-c", _IN_A_TERMINAL, "chat", *arguments, "--threads", "1"]
        env = {**os.environ, "TERM": "dumb", "PYTHONUTF8": "1"}
        streams = {"stdin": end, "stdout": end, "stderr": end}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
        os.close(end)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, pattern: str, start: int = 0, seconds: float = 30) -> int:
        """Where the first match after `start` ends, as soon as there is one."""
        deadline = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.out, start)):
            ready, _, _ = select.select([self._end], [], [], max(0, deadline - time.monotonic()))
            got = b""
            with suppress(OSError):  # it ended
                got = os.read(self._end, 65536) if ready else b""
            assert got, f"no {pattern!r} in {self.out[start:]!r}"
            self.out += got.decode(errors="replace")
        return found.end()

    def interrupt(self, pattern: str, start: int) -> int:
        """Ctrl-C at the prompt; again where readline missed one that came before it waited."""
        for _ in range(10):
            self.type("\x03")
            with suppress(AssertionError):
                return self.until(pattern, start, seconds=3)
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
    terminal.until(r"system prompt: none\s+> $", at)
    for _ in range(5):
        for _ in range(2):
            terminal.type("\x03")
            time.sleep(AGAIN_SECONDS / 4)
        with suppress(subprocess.TimeoutExpired):  # readline missed one, see `interrupt`
            terminal.process.wait(4)
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
    assert terminal.process.wait(30) == 0


# -- the line of a turn ------------------------------------------------------------------------------


def line(**more: Any) -> str:
    return turn_line(RequestReport(**{"total": 9, "matched": 4, "cached": 4, "source": "live", **more}))


def test_a_reason_stands_at_the_end_where_there_is_one() -> None:
    plain = line(reason="", first_token_seconds=0.0123)
    assert plain == "cached 4 of 9, decoded 5, first token after 12 ms"
    assert line(reason="whole prompt known", first_token_seconds=0.0123) == f"{plain}; whole prompt known"


def test_a_prompt_that_was_stopped_claims_neither_a_token_nor_what_was_left() -> None:
    assert line(reason="", cancelled=True) == "cached 4 of 9, stopped in the prompt"
    assert "decoded 5" in line(reason="", cancelled=True, generated=1)


def test_drafts_are_told_where_there_were_any() -> None:
    told = line(reason="", drafted=12, accepted=9, rollbacks={"planes": 2, "snapshot": 1})
    assert told.endswith(", drafted 12, accepted 9, taken back 2 by planes, 1 by snapshot")
    assert line(reason="", drafted=3, accepted=3).endswith(", drafted 3, accepted 3")
    assert "draft" not in line(reason="")
