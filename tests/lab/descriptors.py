"""A process without file descriptors."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SPARE = 64


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing in the block, as on a busy server.

    The garbage collector waits: it would close files of what earlier tests left.
    """
    gc.disable()
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sinks: list[int] = []
    highest = max((int(name) for name in os.listdir("/dev/fd")), default=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, highest + SPARE), hard))
    try:
        with suppress(OSError):
            while True:
                sinks.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for sink in sinks:
            os.close(sink)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.enable()
