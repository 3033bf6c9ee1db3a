"""Ports for servers of tests, and waiting until something is so."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SECONDS = 180
"""Most seconds that anything expected takes on a slow and busy machine."""


def wait_until(true: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Poll until `true()`. Raises AssertionError after `seconds`."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "the condition was not reached"
        time.sleep(0.002)


def free_port() -> int:
    """Return a port that no connection of another test is given before a server binds it.

    Systems give connections ports from 32768 on.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def listens(port: int) -> bool:
    """Tell whether a server of this machine takes connections at a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
