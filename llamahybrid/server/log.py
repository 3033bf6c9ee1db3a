"""The server's log, written by a thread of its own: a slow reader cannot stop the server."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from copy import deepcopy
from queue import Full, Queue
from typing import Any

from uvicorn.config import LOGGING_CONFIG

MOST_LINES = 10_000
"""Most lines in the queue; further ones are dropped, and a line reports their number."""

LAST_SECONDS = 1.0
"""Seconds for the last lines at the end of the program."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Background(logging.Handler):
    """Writes records to "stdout" or "stderr" in a thread; drops them if that is closed."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        found = getattr(sys, stream)
        self._file = None if found is None else _descriptor(found)
        self._lines: Queue[str | None] = Queue(MOST_LINES)
        self._dropped = 0
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. Control characters are escaped, further lines of a record indented."""
        if self._file is None:
            return
        try:
            self._lines.put_nowait(self.format(record).translate(_CONTROLS).replace("\n", "\n  ") + "\n")
        except Full:
            with self._counting:
                self._dropped += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="llamahybrid-log", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait up to `LAST_SECONDS` for the queue to empty."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, LAST_SECONDS)

    def close(self) -> None:
        """Flush, and end the thread."""
        self.flush()
        with suppress(Full):
            self._lines.put_nowait(None)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                line += f"{dropped} lines of this log were dropped: nobody read them in time\n"
            data = line.encode("utf-8", "backslashreplace")
            with suppress(OSError):  # the reader has gone
                while data:
                    data = data[os.write(self._file, data) :]  # type: ignore[arg-type]
            self._lines.task_done()


def flush() -> None:
    """Flush the handlers of a server."""
    for name in ("uvicorn", "uvicorn.access", "llamahybrid", "llamahybrid.server"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, Background):
                handler.flush()


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def _colours(stream: str) -> bool:
    found = getattr(sys, stream)
    return found is not None and bool(found.isatty())


def configuration() -> dict[str, Any]:
    """uvicorn's configuration of logging, with these handlers."""
    made: dict[str, Any] = deepcopy(LOGGING_CONFIG)
    for name, stream in (("default", "stderr"), ("access", "stdout")):
        made["formatters"][name]["use_colors"] = _colours(stream)
        made["handlers"][name] = {"()": Background, "formatter": name, "stream": stream}
    made["formatters"]["plain"] = {"format": "%(message)s"}
    made["handlers"]["plain"] = {
        **{"()": Background, "formatter": "plain", "stream": "stderr", "level": "WARNING"}
    }
    made["loggers"] |= {"llamahybrid": {"handlers": ["plain"]}, "asyncio": {"handlers": ["plain"]}}
    made["loggers"]["llamahybrid.server"] = made["loggers"]["uvicorn"]
    return made
