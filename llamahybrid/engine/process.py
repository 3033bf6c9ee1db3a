"""Run one step of a build: parse its output for progress, log it, and end all processes on an interrupt."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from llamahybrid.errors import EngineError

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the running step, the number of finished ones, and of all (0: unknown)."""

MANY = 200
"""Steps of which not each has a line."""

_PHASES = ("Installing build dependencies", "Preparing metadata", "Configuring CMake", "Building wheel")
_FULL = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_GRACE_SECONDS = 10.0
"""Time from SIGTERM to SIGKILL."""


def run(
    command: Sequence[str],
    progress: Progress,
    log: Path,
    failure: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command to its end; the log file stays only if the command fails by itself.

    Args:
        command: program and arguments.
        progress: receives each step that the output names.
        log: file for the output.
        failure: beginning of the error message.
        environment: variables; None: those of this process.

    Raises:
        EngineError: the command failed; the message names the log and ends with its last lines.
        OSError: the log cannot be written.
    """
    lines: deque[str] = deque(maxlen=20)
    full = False
    try:
        with (
            log.open("w", encoding="utf-8") as record,
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",  # in any locale: compilers print typographic quotes
                errors="replace",
                start_new_session=True,  # a group of its own, to end pip, ninja and compilers together
            ) as process,
        ):
            try:
                for line in process.stdout or ():
                    record.write(line)
                    lines.append(line)
                    full = full or bool(_FULL.search(line))
                    if step := _step(line):
                        progress(*step)
            except BaseException:
                _end(process)
                raise
    except KeyboardInterrupt:
        log.unlink(missing_ok=True)
        raise
    if process.returncode:
        if full:
            failure = "the disk is full: free a few GiB, or set LLAMAHYBRID_CACHE_DIR to a folder on another"
        raise EngineError(f"{failure}; the whole log is {log}. Its end:\n{''.join(lines)}")
    log.unlink()


@contextmanager
def display() -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, else a line for a step, or for each tenth of many."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        *(progress.TextColumn("{task.description}", markup=False), progress.BarColumn(20)),
        *(progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()),
    )
    with progress.Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda text, done, of: bars.update(
            task, completed=done, total=of or None, description=text[:60]
        )


def _lines() -> Progress:
    """Print a line for a step that begins, unless the last line has the same step, or the same tenth."""
    last: object = None

    def show(text: str, done: int, of: int) -> None:
        nonlocal last
        now = (text if not of else done) if of <= MANY else done * 10 // of
        if now != last and (done < of or not of):
            last = now
            print(f"[{done + 1}/{of}] {text}" if of else text, file=sys.stderr, flush=True)

    return show


def _step(line: str) -> tuple[str, int, int] | None:
    """Parse ninja's ``[3/120] Building ...``, make's ``[ 42%] Building ...`` and pip's phases."""
    if found := re.match(r"\s*\[\s*(\d+)(?:/(\d+)|%)\]\s*(.*)", line):
        done, total, text = found.groups()
        return text, int(done), int(total or 100)
    phase = next((phase for phase in _PHASES if phase in line), None)
    return (phase, 0, 0) if phase else None


def _end(process: subprocess.Popen[str]) -> None:
    """End a process group: SIGTERM, then SIGKILL."""
    if sys.platform == "win32":
        process.terminate()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
            return
