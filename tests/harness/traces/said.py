"""Messages for tests of traces, and a trace of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.traces.hashing import Hasher
from llamahybrid.harness.traces.trace import Entry, TraceWriter, read

SECRET = "The password of the harbour is Seagull."
MESSAGES = ({"role": "system", "content": SECRET}, {"role": "user", "content": "Who goes there?"})
MORE = (*MESSAGES, {"role": "assistant", "content": "I do."}, {"role": "user", "content": "And who else?"})


def written(
    path: Path, *asks: Request, hashed: bool = False, words: Sequence[int] = (), control: Sequence[int] = ()
) -> list[Request]:
    """Write a trace of these; what is read of it."""
    writer = TraceWriter(path, "test", Hasher() if hashed else None)
    for ask in asks:
        writer.add(Entry(0.5, ask, "an answer", (1, 2), 10, 3, 0.1, 0.05), words, control)
    writer.close()
    return [entry.ask for entry in read(path)]
