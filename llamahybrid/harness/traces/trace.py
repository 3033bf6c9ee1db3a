"""Traces: JSONL files with a head line and a line for each finished request."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, TextIO

from llamahybrid.errors import ReportError
from llamahybrid.files import open_alone
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.traces.hashing import Hasher

logger = logging.getLogger("llamahybrid")

FORMAT = 1
KIND = "llamahybrid trace"


@dataclass(frozen=True)
class Entry:
    """A recorded request."""

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}
    at: float
    """Seconds since the trace began."""
    ask: Request
    text: str = ""
    """Answer; empty in a hashed trace."""
    answer: tuple[int, ...] = ()
    """Token ids of the answer, if known."""
    total: int | None = None
    cached: int | None = None
    seconds: float | None = None
    ttft: float | None = None


class TraceWriter:
    """Writes requests to a file, which it truncates first; from any thread.

    A write error ends the recording with a warning; the recorded program goes on.
    """

    def __init__(self, path: Path, source: str, hasher: Hasher | None = None) -> None:
        """`source`: description of the recorder. Raises OSError, also if another process writes there."""
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
            if not self._begun:  # not before, so that a failed start keeps the older trace
                with suppress(OSError):  # a pipe has no length
                    os.ftruncate(self._file.fileno(), 0)
                self._begun, text = True, f"{json.dumps(self._head)}\n{text}"
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._ended = True  # the last line may be incomplete
            logger.warning("recording ends here, the trace is not complete: %s", error)

    def now(self) -> float:
        """Return the seconds since the trace began."""
        return time.monotonic() - self._began

    def add(self, entry: Entry, control: Sequence[int] = ()) -> None:
        """Write a request; `control`: tokens that a hashed trace keeps, because they are no text."""
        hasher = self._hasher
        ask = asdict(entry.ask)
        del ask["chat"]  # `chats` finds them
        answer: list[Any] = list(entry.answer)
        if hasher is not None:
            ask, answer = hasher.ask(ask, answer, frozenset(control))
        figures = {name: getattr(entry, name) for name in ("at", "total", "cached", "seconds", "ttft")}
        text = "" if hasher else entry.text
        self._line({**figures, "ask": ask, "answer": answer, "text": text})

    def close(self) -> None:
        """End the trace."""
        with self._lock:
            if not self._ended:
                self._write("")
                self._ended = True
            with suppress(OSError):  # of what could not be written
                self._file.close()


@dataclass(frozen=True)
class Trace:
    """A trace in memory."""

    hashed: bool
    entries: Sequence[Entry] = field(default_factory=tuple)


def read(path: Path) -> Trace:
    """Read a trace. Raises ReportError for a malformed file or line, OSError.

    An incomplete last line, of a killed program, is left out.
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


def _entries(path: Path, file: TextIO, hashed: bool) -> Iterator[Entry]:
    import pydantic

    entry = pydantic.TypeAdapter(Entry)
    for number, line in enumerate(file, 2):
        if not line.endswith("\n"):
            return
        try:
            found = entry.validate_json(line)
            if hashed and not all(map(_hidden, (*found.ask.messages, *found.ask.tools))):
                raise ValueError("the trace is hashed, and this is not")
        except (ValueError, KeyError, TypeError) as error:
            raise ReportError(f"{path}, line {number}: no request: {error}") from error
        yield found


def _hidden(piece: Mapping[str, Any]) -> bool:
    """Tell whether a message, or the tools, of a hashed trace is a length and hashes."""
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
    """Return a chat for each request: that of the most similar earlier one, if they share half."""
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


def pieces_of(ask: Request) -> Sequence[Any]:
    """Return the pieces that prompts are compared by: token ids, or characters of the messages."""
    return ask.tokens or rendered(ask)


def rendered(ask: Request) -> str:
    """Return messages as one text, for the comparison of prefixes."""
    parts = [ask.text]
    for message in ask.messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
        calls = message.get("tool_calls")
        parts.append(f"<{message.get('role', '')}>{text}{json.dumps(calls, sort_keys=True) if calls else ''}")
    return "".join(parts)
