"""Where code runs that nobody called: finalisers, by the garbage collector or under another frame of ours.

A generator that is collected runs its `finally` blocks in whatever thread the collector happened to start,
under whatever lock that holds. Python does not say so to the generator; here it can be asked.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

_thread = threading.local()

_MODULES = ("runner", "checkpoints", "stoppable", "gate", "boundaries", "schedule")
_OURS = (
    *(f"llamahybrid.{room}." for room in ("memory", "prompt_cache", "speculation", "capi")),
    *(f"llamahybrid.request.{module}" for module in _MODULES),
)
"""Modules whose code may be in the middle of a change, or hold a lock."""


def collecting() -> bool:
    """This thread is inside the garbage collector, or the interpreter ends."""
    return sys.is_finalizing() or getattr(_thread, "collects", False)


def in_finaliser() -> bool:
    """No time for native work and locks: the collector runs, Python ends, or code of ours is below."""
    if collecting():
        return True
    frame = sys._getframe(1)
    own = frame.f_globals.get("__name__", "")
    below = frame.f_back
    while below is not None:
        name = below.f_globals.get("__name__", "")
        if name != own and isinstance(name, str) and name.startswith(_OURS):
            return True
        below = below.f_back
    return False


def _note(phase: str, info: dict[str, Any]) -> None:
    _thread.collects = phase == "start"


gc.callbacks.append(_note)
