"""Runs one step of a build: its output tells progress and goes to a log; an end reaches all it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from llamahybrid.errors import EngineError

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with steps done, steps in all (0: not known yet) and what is being done."""

_PHASES = ("Installing build dependencies", "Preparing metadata", "Configuring CMake", "Building wheel")
_FULL = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_PATIENCE = 10.0
"""Seconds a build may take to end when told to."""


def read_step(line: str) -> tuple[int, int, str] | None:
    """What a line of build output says of progress, as (done, in all, what), if anything.

    Understands ninja's ``[3/120] Building ...``, make's ``[ 42%] Building ...`` and pip's phases.
    """
    if found := re.match(r"\s*\[\s*(\d+)(?:/(\d+)|%)\]\s*(.*)", line):
        done, total, what = found.groups()
        return int(done), int(total or 100), what
    phase = next((phase for phase in _PHASES if phase in line), None)
    return (0, 0, phase) if phase else None


def run(
    command: Sequence[str],
    progress: Progress,
    log: Path,
    failure: str,
    *,
    environment: Mapping[str, str] | None = None,
    made: Callable[[], bool] = lambda: True,
) -> None:
    """Run a command to its end; the log is kept only if it fails by itself.

    Args:
        command: program and arguments.
        progress: told of each step that the output names.
        log: the file for the output.
        failure: what to say if it fails.
        environment: its variables; None: those of this process.
        made: whether what it was to make is there.

    Raises:
        EngineError: it failed; the message is `failure`, names the log and ends with its last lines.
        OSError: the log cannot be written.
    """
    lines: deque[str] = deque(maxlen=20)
    try:
        full, code = _follow(command, progress, log, environment, lines)
    except KeyboardInterrupt:
        log.unlink(missing_ok=True)
        raise
    if code or not made():
        if full:
            failure = "the disk is full: free a few GiB, or set LLAMAHYBRID_CACHE_DIR to a folder on another"
        raise EngineError(f"{failure}; the whole log is {log}. Its end:\n{''.join(lines)}")
    log.unlink()


def _follow(
    command: Sequence[str],
    progress: Progress,
    log: Path,
    environment: Mapping[str, str] | None,
    lines: deque[str],
) -> tuple[bool, int]:
    """Run it, keeping its last lines; whether it found the disk full, and its exit status."""
    full = False
    with log.open("w", encoding="utf-8") as record:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",  # whatever the locale says: compilers quote with letters that not each one has
            errors="replace",
            start_new_session=True,  # so that an end can reach pip, ninja and the compilers alike
        )
        with process:
            try:
                for line in process.stdout or ():
                    record.write(line)
                    lines.append(line)
                    full = full or bool(_FULL.search(line))
                    if step := read_step(line):
                        progress(*step)
            except BaseException:
                end(process)
                raise
    return full, process.returncode


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started; by force, if it does not end by itself."""
    if sys.platform == "win32":
        process.terminate()
        return
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended by itself meanwhile
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
            return
