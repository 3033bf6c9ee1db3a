"""The memory of the process that a probe runs in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamahybrid.harness.hazards.effect import NotApplicable


@contextmanager
def memory_left(extra: int) -> Iterator[None]:
    """Let this process allocate at most about `extra` bytes more, so that a huge allocation fails at once."""
    if sys.platform != "linux":
        raise NotApplicable("memory can be limited on Linux only")
    import resource

    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, of which only differences are meaningful.

    On Linux since the start of its program: `ru_maxrss` may be the parent's.
    """
    if sys.platform == "win32":
        raise NotApplicable("peak memory is not known here")
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
