"""Messages of callers' threads to the decode loop, and its replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from llamahybrid.core.reply import Reply
from llamahybrid.core.request import Request, Task


@dataclass(frozen=True)
class Run:
    """Run a task once its request has a slot."""

    task: Task


@dataclass(frozen=True)
class Resume:
    """Continue an answer whose reader asks for more tokens than were published."""

    request: Request


@dataclass(frozen=True)
class End:
    """End a request: keep its progress, release its slot, report it."""

    request: Request
    reply: Reply | None = None


@dataclass(frozen=True)
class Call:
    """Do work that needs no slot, between two batches."""

    request: Request
    work: Callable[[], Any]
    reply: Reply


@dataclass(frozen=True)
class Look:
    """Wake the loop: a request was cancelled."""

    cancel: bool = False
    """Cancel all requests whose messages came before this one."""


@dataclass(frozen=True)
class Stop:
    """End the loop."""

    reply: Reply | None = None


Message: TypeAlias = Run | Resume | End | Call | Look | Stop
