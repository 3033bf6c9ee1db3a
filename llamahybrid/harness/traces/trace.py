"""Traces: JSONL files with a head line and a line for each finished request."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from llamahybrid.errors import ReportError
from llamahybrid.files import open_alone
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.traces.hashing import Hasher

logger = logging.getLogger("llamahybrid")

FORMAT = 2
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
        self._head = {"kind": KIND, "format": FORMAT, "made": made, "source": source}

    def _write(self, text: str) -> None:
        if self._ended:
            return
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

    def add(self, entry: Entry, words: Sequence[int] = (), control: Collection[int] = ()) -> None:
        """Write a request; `words`, `control`: tokens of its model, see `Hasher.hide`."""
        if self._hasher is not None:
            ask, answer = self._hasher.hide(entry.ask, entry.answer, words, control)
            entry = replace(entry, ask=ask, answer=answer, text="")
        line = asdict(entry)
        del line["ask"]["chat"]  # `chats` finds them
        with self._lock:
            self._write(f"{json.dumps(line)}\n")

    def close(self) -> None:
        """End the trace."""
        with self._lock:
            self._write("")
            self._ended = True
            with suppress(OSError):  # of what could not be written
                self._file.close()


def read(path: Path) -> list[Entry]:
    """Read a trace. Raises ReportError for a malformed file or line, OSError.

    An incomplete last line, of a killed program, is left out.
    """
    import pydantic

    reader, found = pydantic.TypeAdapter(Entry), list[Entry]()
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            head = json.loads(file.readline())
        except (ValueError, RecursionError) as error:
            raise ReportError(f"{path}, line 1: no JSON: {error}") from error
        if not isinstance(head, dict) or head.get("kind") != KIND:
            raise ReportError(f"{path} is no trace of `llamahybrid record`")
        if head.get("format") != FORMAT:
            raise ReportError(
                f"{path}: format {head.get('format')!r}: this llamahybrid reads format {FORMAT}"
            )
        for number, line in enumerate(file, 2):
            try:
                if line.endswith("\n"):
                    found.append(reader.validate_json(line))
            except ValueError as error:
                raise ReportError(f"{path}, line {number}: no request: {error}") from error
    return found


def chats(entries: Sequence[Entry]) -> list[str]:
    """Return a chat for each request: that of the most similar earlier one, if they share half."""
    named: list[str] = []
    lasts: dict[str, Sequence[Any]] = {}
    for entry in entries:
        pieces = entry.ask.tokens or rendered(entry.ask)  # token ids, or characters
        best, most = str(len(lasts)), 0.0
        for chat, other in lasts.items():
            same = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(pieces, other, strict=False))
            )
            share = same / max(1, min(len(pieces), len(other)))
            if share >= 0.5 and share > most:
                best, most = chat, share
        lasts[best] = pieces
        named.append(best)
    return named


def rendered(ask: Request) -> str:
    """Return messages as one text, for the comparison of prefixes."""
    parts = [ask.text]
    for message in ask.messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
        calls = message.get("tool_calls")
        parts.append(f"<{message.get('role', '')}>{text}{json.dumps(calls, sort_keys=True) if calls else ''}")
    return "".join(parts)
