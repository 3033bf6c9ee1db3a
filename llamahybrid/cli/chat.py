"""`llamahybrid chat MODEL`: a chat in the terminal; each turn ends with its cached and decoded tokens."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamahybrid.cli.dialogue import Dialogue, Step
from llamahybrid.client.handle import RequestHandle
from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.errors import RequestCancelled
from llamahybrid.llama import Llama

readline: ModuleType | None
try:
    import readline
except ImportError:  # not on every system
    readline = None

LONG_TOKENS = 256
"""Prompts with at most this many tokens to decode are too short for a bar."""

_THINK, _THINK_END = "<think>", "</think>"
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
_CONTROLS[ord("\r")] = ""
"""Control characters of an answer, which must not control the terminal."""


def turn_line(report: RequestReport) -> str:
    """A line about a request."""
    stopped = report.cancelled and not report.generated
    line = f"cached {report.cached} of {report.total}, "
    line += "stopped in the prompt" if stopped else f"decoded {report.left}"
    if not stopped:
        line += f", first token after {report.first_token_seconds:.2f} s"
    if report.drafted:
        line += f", drafted {report.drafted}, accepted {report.accepted}"
    if report.rollbacks:
        line += ", taken back " + ", ".join(f"{n} by {kind}" for kind, n in report.rollbacks.items())
    return f"{line}; {report.reason}" if report.reason else line


def without_thinking(text: str) -> str | None:
    """An answer as it is stored in the history; None if its thinking never ended."""
    _, end, said = text.rpartition(_THINK_END)
    if not end and text.lstrip().startswith(_THINK):
        return None
    return said.lstrip() if end else text


class PromptBar:
    """Progress and remaining time of a long prompt, until its answer begins; invisible without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def show(self, progress: PromptProgress) -> None:
        """Update the bar."""
        bar = self._bar
        if bar is None:
            can_show = self._console.is_terminal and not self._console.is_dumb_terminal
            if not can_show or progress.total - progress.processed <= LONG_TOKENS:
                return
            columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            bar = self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            bar.add_task("", total=progress.total, completed=progress.cached)
            bar.start()
        bar.update(bar.task_ids[0], completed=progress.processed, refresh=True)
        if progress.processed >= progress.total:
            self.end()

    def end(self) -> None:
        """Remove the bar."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


class TerminalChat:
    """A chat on standard input and output; without a terminal each line is a message."""

    def __init__(
        self,
        llm: Llama,
        console: Console,
        system: str = "",
        max_tokens: int = 512,
        keep_thinking: bool = False,
    ) -> None:
        self.dialogue = Dialogue([{"role": "system", "content": system}] if system else [])
        self._llm = llm
        self._console = console
        self._max_tokens = max_tokens
        self._keep_thinking = keep_thinking
        self._bar = PromptBar(console)
        self._handle: RequestHandle | None = None
        self._reading = self._stopped = False
        if readline is not None:  # pasted text is one message, not one for each line
            readline.parse_and_bind("set enable-bracketed-paste on")
        for stream in (sys.stdin, sys.stdout):
            if hasattr(stream, "reconfigure"):  # characters outside of the terminal's encoding are replaced
                stream.reconfigure(errors="replace")

    def run(self) -> None:
        """Answer messages until `/quit` or the end of the input."""
        with self._interrupts():
            self._tell(Step(notice="/help lists the commands"))
            while not (step := self._read()).quit:
                self._tell(step)
                if step.answer:
                    self._answer()
            self._tell(step)

    # -- input -------------------------------------------------------------------------------------

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let Ctrl-C cancel the request, or raise at the prompt."""
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupted(self, _: int, __: FrameType | None) -> None:
        if self._reading:
            self._reading = False
            raise KeyboardInterrupt
        self._stopped = True
        if (handle := self._handle) is not None:
            handle.cancel()

    def _read(self) -> Step:
        typed: str | None = None
        try:
            self._reading = True
            self._stopped = False  # after this line Ctrl-C cancels the next request
            typed = self._typed()
            self._reading = False
        except EOFError:
            self._reading = False
        except KeyboardInterrupt:
            self._console.print()
            return self.dialogue.interrupt(time.monotonic())
        if typed is not None:
            return self.dialogue.line(typed)
        if sys.stdin.isatty():
            self._console.print()
        return self.dialogue.end()

    def _typed(self) -> str:
        if not sys.stdin.isatty():
            if not (typed := sys.stdin.readline()):
                raise EOFError
            return typed
        prefill = self.dialogue.prefill
        if readline is None or not prefill or "\n" in prefill:
            return input(self.dialogue.prompt)
        readline.set_startup_hook(lambda: readline.insert_text(prefill))
        try:
            return input(self.dialogue.prompt)
        finally:
            readline.set_startup_hook(None)

    # -- requests and output -------------------------------------------------------------------------

    def _answer(self) -> None:
        """Stream the answer to the last message, store it, and report."""
        finish, text, error = "", "", None
        with self._llm.request(on_progress=self._bar.show) as handle:
            self._handle = handle
            if self._stopped:  # the signal came before the handle existed
                handle.cancel()
            try:
                chunks = self._llm.create_chat_completion(
                    messages=list(self.dialogue.messages), max_tokens=self._max_tokens, stream=True
                )
                for chunk in chunks:
                    choice = chunk["choices"][0]
                    finish = choice["finish_reason"] or finish
                    piece = choice["delta"].get("content") or ""
                    text += piece
                    self._bar.end()
                    self._console.out(piece.translate(_CONTROLS), end="", highlight=False)
            except Exception as raised:  # any failure: the chat continues
                error = raised
            finally:
                self._handle = None
                self._bar.end()
            report = self._llm.last_request if handle.reports else None
        said = text if self._keep_thinking else without_thinking(text)
        if finish != "stop" and not said:
            said = None  # cancelled before the first token
        self.dialogue.answered(said)
        if text:
            self._console.print()
        if error is not None and not isinstance(error, RequestCancelled):
            self._tell(Step(notice=f"{type(error).__name__}: {error}", wrong=True))
        if report is not None:
            how = {"cancelled": "interrupted; ", "length": "cut off at its limit; "}.get(finish, "")
            self._tell(Step(notice=how + turn_line(report)))
        if said is None:
            self._tell(Step(notice="not answered: /retry and /edit try again, a new message replaces it"))

    def _tell(self, step: Step) -> None:
        if step.notice:
            style = "yellow" if step.wrong else "dim"
            text = step.notice.translate(_CONTROLS)
            self._console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)
