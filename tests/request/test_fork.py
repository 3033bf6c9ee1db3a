"""A forked process: it has the tables of OpenMP teams of its parent, whose threads it has not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("serial")]

FORKING = """
import itertools, os, signal, sys
from llamahybrid import Llama

llm = Llama(
    sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, n_parallel=int(sys.argv[2]), verbose=False
)
def answer(prompt):
    return list(itertools.islice(llm.generate(prompt, temp=0.0), 12))

one, two = range(10, 60), range(30, 70)
expected, whole = answer(one), answer(two)
stream = llm.generate(two, temp=0.0)
first = next(stream)

def goes_on():
    return [first, *itertools.islice(stream, 11)] == whole

def child(use):
    pid = os.fork()
    if not pid:
        signal.alarm(150)
        try:
            os._exit(0 if use() and answer(one) == expected else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

print(child(goes_on), child(lambda: stream.close() is None), goes_on(), answer(one) == expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("slots", [1, 2])
def test_forked_processes_and_their_parent_go_on_with_one_model(
    tiny_model: Callable[..., Path], slots: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tiny_model("qwen35")), str(slots)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout.split() == ["0", "0", "True", "True"], done.stderr
