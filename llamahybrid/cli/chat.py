"""`llamahybrid chat MODEL`: a chat in the terminal that says after each turn what had to be decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console

from llamahybrid.llama import Llama
from llamahybrid.request.report import RequestReport

_HELP = "/regen answers again, /edit N TEXT rewrites your message N and goes on from there, /exit leaves"
_THINK_END = "</think>"


def turn_line(report: RequestReport) -> str:
    """One line about a request."""
    line = (
        f"total {report.total}, matched {report.matched}, cached {report.cached}, left {report.left}, "
        f"first token after {report.first_token_seconds * 1e3:.0f} ms"
    )
    if report.drafted:
        line += f", drafted {report.drafted}, accepted {report.accepted}"
    if report.rollbacks:
        line += ", taken back " + ", ".join(f"{n} by {kind}" for kind, n in report.rollbacks.items())
    return f"{line}; {report.reason}" if report.reason else line


@dataclass
class TerminalChat:
    """The messages of one chat, and what the lines typed do to them."""

    llm: Llama
    console: Console
    system: str = ""
    max_tokens: int = 512
    keep_thinking: bool = False
    turns: list[tuple[str, str]] = field(default_factory=list)
    """(what the user said, what was answered), thinking already left out."""

    def run(self) -> None:
        """Answer what is typed, line by line, until `/exit` or the end of the input."""
        self.console.print(_HELP, style="dim")
        while True:
            try:
                text = self.console.input("[bold]> [/]").strip()
            except EOFError:
                return
            if text == "/exit":
                return
            if text:
                self._take(text)

    def _take(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        if command == "/regen" and self.turns:
            self._answer(self.turns.pop()[0])
        elif command == "/edit" and (edit := self._edit(rest)):
            number, said = edit
            del self.turns[number - 1 :]
            self._answer(said)
        elif command.startswith("/"):
            self.console.print(_HELP, style="yellow")
        else:
            self._answer(text)

    def _edit(self, rest: str) -> tuple[int, str] | None:
        number, _, said = rest.partition(" ")
        if said and number.isdecimal() and 1 <= int(number) <= len(self.turns):
            return int(number), said
        return None

    def _answer(self, said: str) -> None:
        """Stream the answer to `said`, keep the turn, and print its line."""
        pieces: list[str] = []
        stream = self.llm.create_chat_completion(
            messages=self._messages(said), max_tokens=self.max_tokens, stream=True
        )
        try:
            for chunk in stream:
                piece = chunk["choices"][0]["delta"].get("content") or ""
                pieces.append(piece)
                self.console.out(piece, end="", highlight=False)
        except KeyboardInterrupt:
            stream.close()
        answer = "".join(pieces)
        self.turns.append((said, answer if self.keep_thinking else answer.rpartition(_THINK_END)[2].lstrip()))
        self.console.print()
        if self.llm.last_request is not None:
            self.console.print(turn_line(self.llm.last_request), style="dim", highlight=False)

    def _messages(self, said: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return [*messages, {"role": "user", "content": said}]
