"""Parse typed lines into messages (of one or more lines) and commands, without a terminal or a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llamahybrid.cli.conversation import Message, read, save

HELP = '''\
/undo [N]      take the last turn back, or the last N
/edit [TEXT]   change the last message (asked for where TEXT is left out), and answer again
/retry         another answer to it
/system TEXT   another system prompt; "-": none; without TEXT: shows it
/save FILE     the messages, as JSON
/load FILE     go on from such a file
/help, /quit   Ctrl-D leaves, too; Ctrl-C ends an answer
A line that ends in a backslash goes on in the next one; so does all between two lines of """.'''

AGAIN_SECONDS = 1.0
"""A second Ctrl-C within this time ends the chat."""
_FENCE = '"""'


@dataclass(frozen=True)
class Step:
    """The result of a line: what the chat says, and does before it reads the next one."""

    notice: str = ""
    wrong: bool = False
    """The notice is an error."""
    answer: bool = False
    """Answer the last message."""
    quit: bool = False
    """End the chat."""


@dataclass
class Dialogue:
    """The conversation, and the message being typed."""

    messages: list[Message] = field(default_factory=list)
    """A system prompt, if any, then user and assistant in turn; only the last one may lack an answer."""
    editing: bool = False
    """The next message replaces the last one."""
    _lines: list[str] = field(default_factory=list)
    _fenced: bool = False
    _interrupted: float | None = None

    @property
    def unfinished(self) -> bool:
        """A message of several lines has begun."""
        return self._fenced or bool(self._lines)

    @property
    def prompt(self) -> str:
        """The prompt of the next line."""
        if self.unfinished:
            return "... "
        return "edit> " if self.editing else "> "

    @property
    def prefill(self) -> str:
        """The initial text of the next line."""
        return self.messages[self._asked()[-1]]["content"] if self.editing and not self.unfinished else ""

    def answered(self, text: str | None) -> None:
        """Set the answer to the last message; None: remove it."""
        del self.messages[self._asked()[-1] + 1 :]
        if text is not None:
            self.messages.append({"role": "assistant", "content": text})

    def interrupt(self, now: float) -> Step:
        """Ctrl-C at the prompt, at a time in seconds: drop the typed text; a second one quits."""
        again = self._interrupted is not None and now - self._interrupted <= AGAIN_SECONDS
        self._drop()
        self.editing = False
        self._interrupted = now
        return Step(quit=True) if again else Step(notice="Ctrl-C again, Ctrl-D or /quit leaves")

    def end(self) -> Step:
        """The end of the input."""
        return Step("a message that was not finished is not sent" if self.unfinished else "", quit=True)

    def line(self, typed: str) -> Step:
        """Process a typed line, or several pasted lines, which are one message."""
        self._interrupted = None
        lines = typed.rstrip("\r\n").split("\n")
        if not self.unfinished and lines[0].strip() == _FENCE:
            self._fenced = True
            del lines[0]
        if self._fenced:
            closed = bool(lines) and lines[-1].strip() == _FENCE
            self._lines += lines[:-1] if closed else lines
            return self._message(self._drop(), literal=True) if closed else Step()
        goes_on = lines[-1].endswith("\\")
        if goes_on:
            lines[-1] = lines[-1][:-1]
        self._lines += lines
        return Step() if goes_on else self._message(self._drop(), literal=False)

    def _drop(self) -> str:
        text = "\n".join(self._lines)
        self._lines, self._fenced = [], False
        return text

    def _message(self, text: str, literal: bool) -> Step:
        if not literal and text.startswith("/"):
            self.editing = False
            name, *rest = text.split(None, 1)
            return self._command(name, *rest)
        said = text if literal else text.strip()
        if self.editing:
            self.editing = False
            return self._edit(said) if said.strip() else Step(notice="not changed")
        if not said.strip():
            return Step()
        if self._waits:
            self.messages.pop()  # it was not answered
        return self._ask(said)

    def _ask(self, text: str) -> Step:
        self.messages.append({"role": "user", "content": text})
        return Step(answer=True)

    def _asked(self) -> list[int]:
        """Indexes of the user's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    # -- commands ----------------------------------------------------------------------------------

    def _command(self, name: str, rest: str = "") -> Step:
        commands: dict[str, Callable[[str], Step]] = {
            "/undo": self._undo,
            "/edit": self._edit,
            "/retry": self._retry,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/help": lambda _: Step(notice=HELP),
            "/quit": lambda _: Step(quit=True),
        }
        if name not in commands:
            return _wrong(f"no command {name}: /help lists them; a space before it makes it a message")
        return commands[name](rest.strip())

    def _undo(self, rest: str) -> Step:
        asked = self._asked()
        if not (rest or "1").isdecimal():
            return _wrong("/undo, or /undo N for the last N turns")
        count = int(rest[:9] or 1)
        if not 1 <= count <= len(asked):
            return _wrong(f"{_counted(len(asked), 'turn')} to take back")
        del self.messages[asked[-count] :]
        return Step(notice=f"{_counted(count, 'turn')} taken back, {len(asked) - count} left")

    def _edit(self, text: str) -> Step:
        asked = self._asked()
        if not asked:
            return _wrong("there is no message to change")
        if not text:
            self.editing = True
            return Step(notice="the message as it should be; an empty line leaves it")
        del self.messages[asked[-1] :]
        return self._ask(text)

    def _retry(self, _: str) -> Step:
        if not self._asked():
            return _wrong("there is no message to answer")
        self.answered(None)
        return Step(answer=True)

    def _system(self, text: str) -> Step:
        old = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        if not text:
            return Step(notice=f"system prompt: {old[0]['content'] if old else 'none'}")
        self.messages[: len(old)] = [] if text == "-" else [{"role": "system", "content": text}]
        return Step(notice="system prompt changed" if text != "-" else "no system prompt")

    def _save(self, name: str) -> Step:
        if not name:
            return _wrong("/save FILE")
        try:
            save(_path(name), self.messages)
        except (ValueError, OSError) as error:
            return _wrong(f"not saved to {name}: {_plain(error)}")
        return Step(notice=f"{_counted(len(self.messages), 'message')} saved to {name}")

    def _load(self, name: str) -> Step:
        if not name:
            return _wrong("/load FILE")
        try:
            self.messages = read(_path(name))
        except (ValueError, OSError) as error:
            return _wrong(f"{name} is not loaded: {_plain(error)}")
        count = _counted(len(self.messages), "message")
        return Step(notice=f"{count} loaded" + ("; /retry answers the last one" if self._waits else ""))

    @property
    def _waits(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "user"


def _wrong(notice: str) -> Step:
    return Step(notice=notice, wrong=True)


def _counted(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'' if n == 1 else 's'}"


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # unknown user
        raise ValueError(str(error)) from error


def _plain(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
