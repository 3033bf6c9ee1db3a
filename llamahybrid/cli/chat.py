"""`llamahybrid chat MODEL`: a chat in the terminal; each turn ends with its cached and decoded tokens."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType

from rich.console import Console

from llamahybrid.cli.chat_requests import ChatRequests, Outcome
from llamahybrid.cli.conversation import Conversation
from llamahybrid.cli.dialogue import ChatAction, Dialogue, Step
from llamahybrid.cli.prompt_bar import PromptBar
from llamahybrid.core.report import RequestReport
from llamahybrid.errors import RequestCancelled
from llamahybrid.llama import Llama

readline: ModuleType | None
try:
    import readline
except ImportError:  # not on every system
    readline = None

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
        line += f", first token after {report.first_token_seconds * 1e3:.0f} ms"
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
        self.dialogue = Dialogue(Conversation(system))
        self._console = console
        self._max_tokens = max_tokens
        self._keep_thinking = keep_thinking
        self._bar = PromptBar(console)
        self._requests = ChatRequests(llm, self._bar.show)
        self._reading = False
        self._hung_up = False
        if readline is not None:  # pasted text is one message, not one for each line
            readline.parse_and_bind("set enable-bracketed-paste on")
        for stream in (sys.stdin, sys.stdout):
            if hasattr(stream, "reconfigure"):  # characters outside of the terminal's encoding are replaced
                stream.reconfigure(errors="replace")

    def run(self) -> None:
        """Answer messages until `/quit` or the end of the input."""
        with self._interrupts():
            try:
                self._talk()
            except OSError:
                if not self._hung_up:  # otherwise the terminal is gone
                    raise

    def _talk(self) -> None:
        self._tell(Step(notice="/help lists the commands"))
        while (step := self._read()).do is not ChatAction.QUIT:
            self._tell(step)
            if step.do is ChatAction.ANSWER:
                self._answer()
            elif step.do is ChatAction.PREPARE:
                self._prepare()
        self._tell(step)

    # -- input -------------------------------------------------------------------------------------

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let Ctrl-C cancel the request, or raise at the prompt, and SIGTERM and SIGHUP end the chat.

        Ignored signals, as SIGHUP under nohup, stay ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupted)}
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._hang_up)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hang_up(self, _: int, __: FrameType | None) -> None:
        """End the chat, as Ctrl-D does at the prompt."""
        self._hung_up = True
        self._requests.stop()
        if self._reading:
            self._reading = False
            raise EOFError

    def _interrupted(self, _: int, __: FrameType | None) -> None:
        if self._reading:
            self._reading = False
            raise KeyboardInterrupt
        self._requests.stop()

    def _read(self) -> Step:
        typed: str | None = None
        try:
            self._reading = True
            self._requests.rearm()  # after this line Ctrl-C cancels the next request
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

    # -- requests and output -------------------------------------------------------------------------

    def _answer(self) -> None:
        """Stream the answer to the last message, store it, and report."""
        pieces: list[str] = []
        with self._bar:
            for piece in self._requests.answer(self.dialogue.conversation.messages, self._max_tokens):
                self._bar.end()
                pieces.append(piece)
                self._console.out(piece.translate(_CONTROLS), end="", highlight=False)
        outcome, text = self._requests.outcome, "".join(pieces)
        said = text if self._keep_thinking else without_thinking(text)
        if outcome.finish != "stop" and not said:
            said = None  # cancelled before the first token
        self.dialogue.conversation.answered(said)
        if text:
            self._console.print()
        self._report(outcome)
        if said is None:
            self._tell(Step(notice="not answered: /retry and /edit try again, a new message replaces it"))

    def _prepare(self) -> None:
        """Decode the history, and report."""
        with self._bar:
            self._requests.prepare(self.dialogue.conversation.messages)
        outcome = self._requests.outcome
        if outcome.error is None:  # some templates refuse a chat that ends in an answer
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
