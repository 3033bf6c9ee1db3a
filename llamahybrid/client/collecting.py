"""Detect calls by the garbage collector, in which no other thread may be waited for.

The `finally` blocks of a collected generator run in any thread in which the collector starts, under any lock
of that thread. Python does not tell the generator.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

_thread = threading.local()


def collecting() -> bool:
    """The calling thread is inside the garbage collector, or the interpreter ends."""
    return sys.is_finalizing() or getattr(_thread, "collects", False)


def _note(phase: str, info: dict[str, Any]) -> None:
    _thread.collects = phase == "start"


gc.callbacks.append(_note)
