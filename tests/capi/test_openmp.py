"""OpenMP's teams are found where libllama has GNU's, and end when they are told to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid.capi import openmp

pytestmark = [pytest.mark.xdist_group("serial")]

CHILD = '''
import os, sys, time
from llamahybrid import Llama
from llamahybrid.capi.openmp import team_ender

def threads():
    return len(os.listdir("/proc/self/task"))

llm = Llama(sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, verbose=False)
def settled(expected):
    """How many there are, once they are `expected` many: a thread that was told to end takes its time."""
    give_up = time.monotonic() + 30
    while threads() != expected and time.monotonic() < give_up:
        time.sleep(0.01)
    return threads()

llm.eval([1, 2, 3])
before = threads()
team_ender()()
after = settled(before - 1)
llm.eval([4])
print(before - after, settled(before) - after)
'''

FORKING = """
import itertools, os, signal, sys
from llamahybrid import Llama

llm = Llama(
    sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, n_parallel=int(sys.argv[2]), verbose=False
)
def answer():
    return list(itertools.islice(llm.generate(range(10, 60), temp=0.0), 12))

expected = answer()
stream = llm.generate(range(30, 70), temp=0.0)
first = next(stream)
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if answer() == expected else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
next(stream)
print(status, answer() == expected)
"""


@pytest.mark.skipif(openmp.team_ender() is None, reason="libllama computes without GNU's OpenMP")
def test_a_team_ends_and_is_made_again(tiny_model):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_THREAD_LIMIT"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny_model("qwen35"))],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.stdout.split() == ["1", "1"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("slots", [1, 2])
def test_a_forked_process_decodes_with_a_model_that_has_decoded(
    tiny_model: Callable[..., Path], slots: int
) -> None:
    """It has the tables of its parent's team, whose threads it has not."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tiny_model("qwen35")), str(slots)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout.split() == ["0", "True"], done.stderr
