"""A trace: a line that says what it is, then a line a request, written as each ends: a crash keeps them."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from llamahybrid.errors import ReportError
from llamahybrid.files import open_alone
from llamahybrid.harness.targets.base import Ask
from llamahybrid.harness.traces.hashing import Hasher

logger = logging.getLogger("llamahybrid")

FORMAT = 1
KIND = "llamahybrid trace"


@dataclass(frozen=True)
class Entry:
    """One request as it was made."""

    at: float
    """Seconds since the trace began."""
    ask: Ask
    text: str = ""
    """The answer; empty in a hashed trace."""
    answer: tuple[int, ...] = ()
    """Its token ids, where they are known."""
    total: int | None = None
    cached: int | None = None
    seconds: float | None = None
    ttft: float | None = None


class TraceWriter:
    """Appends requests to a file, in place of what was in it; from any thread.

    What it cannot write it says once, and ends: whoever is recorded goes on.
    """

    def __init__(self, path: Path, source: str, hasher: Hasher | None = None) -> None:
        """`source`: what records, for people. Raises OSError, too, where another process writes there."""
        self._file = open_alone(path)
        self._hasher, self._lock = hasher, threading.Lock()
        self._began, self._begun, self._ended = time.monotonic(), False, False
        made = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._head = {"kind": KIND, "format": FORMAT, "made": made, "source": source, "hashed": bool(hasher)}

    def _line(self, data: Mapping[str, Any]) -> None:
        text = json.dumps(data) + "\n"
        with self._lock:
            if not self._ended:
                self._write(text)

    def _write(self, text: str) -> None:
        try:
            if not self._begun:  # not before: of a recorder that could not start the older trace stays
                with suppress(OSError):  # a pipe has no length
                    os.ftruncate(self._file.fileno(), 0)
                self._begun, text = True, f"{json.dumps(self._head)}\n{text}"
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._ended = True  # half a line may be there, and nothing can stand behind that
            logger.warning("recording ends here, the trace is not complete: %s", error)

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def add(self, entry: Entry, control: Sequence[int] = ()) -> None:
        """Write one; `control`: tokens that are no text, which a hashed trace shows as they are."""
        hasher = self._hasher
        ask = entry.ask.as_json()
        answer: list[Any] = list(entry.answer)
        if hasher is not None:
            ask, answer = hasher.ask(ask, answer, frozenset(control))
        figures = {name: getattr(entry, name) for name in ("at", "total", "cached", "seconds", "ttft")}
        text = "" if hasher else entry.text
        self._line({**figures, "ask": ask, "answer": answer, "text": text})

    def close(self) -> None:
        """No more comes. A trace without a request is one, too."""
        with self._lock:
            if not self._ended:
                self._write("")
                self._ended = True
            with suppress(OSError):  # of what could not be written
                self._file.close()


@dataclass(frozen=True)
class Trace:
    """A trace that was read."""

    hashed: bool
    entries: Sequence[Entry] = field(default_factory=tuple)


def read(path: Path) -> Trace:
    """Raises ReportError where it is no trace, or a line of it is none, OSError where there is no file.

    A last line without an end, of a program that was killed, is left out.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        head = _parsed(path, 1, file.readline())
        if head.get("kind") != KIND:
            raise ReportError(f"{path} is no trace of `llamahybrid record`")
        if head.get("format") != FORMAT:
            raise ReportError(
                f"{path}: format {head.get('format')!r}: this llamahybrid reads format {FORMAT}"
            )
        hashed = bool(head.get("hashed"))
        return Trace(hashed, tuple(_entries(path, file, hashed)))


_NUMBER = (int, float, type(None))
_TYPES: Mapping[str, tuple[type, ...]] = {
    "at": (int, float),
    "total": (int, type(None)),
    "cached": (int, type(None)),
    "seconds": _NUMBER,
    "ttft": _NUMBER,
    "text": (str,),
}


def _entries(path: Path, file: TextIO, hashed: bool) -> Iterator[Entry]:
    for number, line in enumerate(file, 2):
        if not line.endswith("\n"):
            return
        data = _parsed(path, number, line)
        try:
            figures = {name: data[name] for name in _TYPES}
            if odd := [name for name, types in _TYPES.items() if not isinstance(figures[name], types)]:
                raise TypeError(f"{', '.join(odd)}: not what stands there")
            ask = Ask.from_json(data["ask"])
            if not all(isinstance(each, int) for each in (*ask.tokens, *data["answer"], ask.max_tokens)):
                raise TypeError("token ids are numbers")
            if not all(isinstance(each, Mapping) for each in ask.messages):
                raise TypeError("messages are objects")
            if hashed and not all(map(_hidden, (*ask.messages, *ask.tools))):
                raise TypeError("the trace is hashed, and this is not")
            yield Entry(ask=ask, answer=tuple(data["answer"]), **figures)
        except (KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"{path}, line {number}: no request: {error}") from error


def _hidden(piece: Mapping[str, Any]) -> bool:
    """A message, or the tools, of a hashed trace: a length and hashes."""
    numbers = piece["hidden"]
    return bool(numbers) and all(type(each) is int and each >= 0 for each in numbers)


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}, line {number}: no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ReportError(f"{path}, line {number}: no object")
    return data


def chats(entries: Sequence[Entry]) -> list[str]:
    """A chat for each request: that of the request before which it shares most with, if that is a half."""
    named: list[str] = []
    lasts: dict[str, Sequence[Any]] = {}
    for entry in entries:
        pieces = pieces_of(entry.ask)
        best, most = "", 0.0
        for chat, other in lasts.items():
            same = next(
                (i for i, (a, b) in enumerate(zip(pieces, other, strict=False)) if a != b),
                min(len(pieces), len(other)),
            )
            share = same / max(1, min(len(pieces), len(other)))
            if share >= 0.5 and share > most:
                best, most = chat, share
        best = best or str(len(lasts))
        lasts[best] = pieces
        named.append(best)
    return named


def pieces_of(ask: Ask) -> Sequence[Any]:
    """What prompts are compared by: token ids, or characters of the messages."""
    return ask.tokens or rendered(ask)


def rendered(ask: Ask) -> str:
    """Messages as one text, of which only what is common matters."""
    parts = [ask.text]
    for message in ask.messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
        calls = message.get("tool_calls")
        parts.append(f"<{message.get('role', '')}>{text}{json.dumps(calls, sort_keys=True) if calls else ''}")
    return "".join(parts)
