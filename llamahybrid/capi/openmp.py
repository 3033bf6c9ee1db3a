"""The teams of threads that OpenMP keeps, one for each thread that has computed.

GNU's keeps a team until its thread ends or says otherwise. With more threads in all teams together than there
are cores, those that wait at a barrier sleep where they span before (libgomp, do_spin): a token then takes
twice as long, for whoever decodes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial

from llama_cpp import llama_cpp

SOFT = 1
"""omp_pause_soft (omp.h)."""


@cache
def team_ender() -> Callable[[], object] | None:
    """What ends the calling thread's team, which is made again when it computes: far less work than a token.

    None where libllama computes without GNU's OpenMP, or where that cannot be told.
    """
    library = llama_cpp._lib
    if not hasattr(library, "GOMP_parallel") or hasattr(library, "__kmpc_fork_call"):  # LLVM's has both
        return None
    if not hasattr(library, "omp_pause_resource_all"):  # before GCC 9
        return None
    pause = library.omp_pause_resource_all
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return partial(pause, SOFT)


def leave_team() -> None:
    """End the calling thread's team: another thread decodes from now on."""
    if (end := team_ender()) is not None:
        end()


def _end_team() -> None:
    """A child process has no threads but the one that forks: it would wait for its team's for ever."""
    if (end := team_ender()) is not None:
        end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_team)
