"""`llamahybrid chat MODEL`: a chat in the terminal that says after each turn what had to be decoded."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType, ModuleType

from rich.console import Console

from llamahybrid.cli.asking import Asking, Outcome
from llamahybrid.cli.conversation import Conversation
from llamahybrid.cli.dialogue import Dialogue, Do, Step
from llamahybrid.cli.prompt_bar import PromptBar
from llamahybrid.cli.signals import delivered
from llamahybrid.core.report import RequestReport
from llamahybrid.errors import RequestCancelled
from llamahybrid.llama import Llama

readline: ModuleType | None
try:
    import readline
except ImportError:  # not on every system; input() then edits as the terminal does
    readline = None

_THINK, _THINK_END = "<think>", "</think>"
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
_CONTROLS[ord("\r")] = ""
"""An answer must not steer the terminal."""


def turn_line(report: RequestReport) -> str:
    """One line about a request."""
    stopped = report.cancelled and not report.generated
    line = f"cached {report.cached} of {report.total}, "
    line += "stopped in the prompt" if stopped else f"decoded {report.left}"
    if not stopped:
        line += f", first token after {report.first_token_seconds * 1e3:.0f} ms"
    if report.drafted:
        line += f", drafted {report.drafted}, accepted {report.accepted}"
    if report.rollbacks:
        line += ", taken back " + ", ".join(f"{n} by {kind}" for kind, n in report.rollbacks.items())
    return f"{line}; {report.reason}" if report.reason else line


def without_thinking(text: str) -> str | None:
    """An answer as it is sent back with the history; None where its thinking never ended."""
    _, end, said = text.rpartition(_THINK_END)
    if not end and text.lstrip().startswith(_THINK):
        return None
    return said.lstrip() if end else text


class TerminalChat:
    """A chat on standard input and output; where that is no terminal, each line is a message."""

    def __init__(
        self,
        llm: Llama,
        console: Console,
        system: str = "",
        max_tokens: int = 512,
        keep_thinking: bool = False,
    ) -> None:
        self.dialogue = Dialogue(Conversation(system))
        self._console = console
        self._max_tokens = max_tokens
        self._keep_thinking = keep_thinking
        self._asking = Asking(llm)
        self._reading = False
        self._hung_up = False
        if readline is not None:  # what is pasted is one text then, and not a message for each line
            readline.parse_and_bind("set enable-bracketed-paste on")
        for stream in (sys.stdin, sys.stdout):
            if hasattr(stream, "reconfigure"):  # what is not in the terminal's encoding ends no chat
                stream.reconfigure(errors="replace")

    def run(self) -> None:
        """Answer what is typed until `/quit` or the end of the input."""
        with closing(self._asking), self._interrupts():
            try:
                self._talk()
            except OSError:
                if not self._hung_up:  # else there is no terminal to write to
                    raise

    def _talk(self) -> None:
        self._tell(Step(notice="/help lists the commands"))
        while (step := self._read()).do is not Do.QUIT:
            self._tell(step)
            if step.do is Do.ANSWER:
                self._answer()
            elif step.do is Do.PREPARE:
                self._prepare()
        self._tell(step)

    # -- input -------------------------------------------------------------------------------------

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C ends what runs; it is raised only where a line is read. SIGTERM and SIGHUP end the chat.

        A signal that is ignored, as SIGHUP is under nohup, stays so.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupted)}
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._told_to_end)
        try:
            with delivered(lambda: self._hung_up):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told_to_end(self, _: int, __: FrameType | None) -> None:
        """As Ctrl-D, wherever the chat is."""
        self._hung_up = True
        self._asking.stop()
        if self._reading:
            self._reading = False
            raise EOFError

    def _interrupted(self, _: int, __: FrameType | None) -> None:
        if self._reading:
            self._reading = False
            raise KeyboardInterrupt
        self._asking.stop()

    def _read(self) -> Step:
        typed: str | None = None
        try:
            self._reading = True
            self._asking.rearm()  # from when the line is there, Ctrl-C is about what comes of it
            if not self._hung_up:
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

    # -- requests and what is shown ----------------------------------------------------------------

    def _answer(self) -> None:
        """Stream the answer to the last message, keep it, and tell what was reused."""
        pieces: list[str] = []
        with self._progress() as bar:
            for piece in self._asking.answer(self.dialogue.conversation.messages, self._max_tokens):
                bar.end()
                pieces.append(piece)
                self._console.out(piece.translate(_CONTROLS), end="", highlight=False)
        outcome, text = self._asking.outcome, "".join(pieces)
        said = text if self._keep_thinking else without_thinking(text)
        if outcome.finish != "stop" and not said:
            said = None  # nothing came, which is no answer
        self.dialogue.conversation.answered(said)
        if text:
            self._console.print()
        self._report(outcome)
        if said is None:
            self._tell(Step(notice="not answered: /retry and /edit try again, a new message replaces it"))

    def _progress(self) -> PromptBar:
        bar = PromptBar(self._console)
        self._asking.on_progress = bar.show
        return bar

    def _prepare(self) -> None:
        """Decode the history, and tell what of it was reused."""
        with self._progress():
            self._asking.prepare(self.dialogue.conversation.messages)
        outcome = self._asking.outcome
        if outcome.error is None:  # there are templates that take no chat which ends in an answer
            self._report(outcome)

    def _report(self, outcome: Outcome) -> None:
        if outcome.error is not None and not isinstance(outcome.error, RequestCancelled):
            self._tell(Step(notice=f"{type(outcome.error).__name__}: {outcome.error}", wrong=True))
        if outcome.report is not None:
            how = {"cancelled": "interrupted; ", "length": "cut off at its limit; "}.get(outcome.finish, "")
            self._tell(Step(notice=how + turn_line(outcome.report)))

    def _tell(self, step: Step) -> None:
        if step.notice:
            style = "yellow" if step.wrong else "dim"
            text = step.notice.translate(_CONTROLS)
            self._console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)
