"""Whether the garbage collector runs in the calling thread: no time to wait for another one.

A generator that is collected runs its `finally` blocks in whatever thread the collector happened to start,
under whatever lock that holds. Python does not say so to the generator; here it can be asked.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

_thread = threading.local()


def collecting() -> bool:
    """This thread is inside the garbage collector, or the interpreter ends."""
    return sys.is_finalizing() or getattr(_thread, "collects", False)


def _note(phase: str, info: dict[str, Any]) -> None:
    _thread.collects = phase == "start"


gc.callbacks.append(_note)
