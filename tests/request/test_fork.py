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
def answer():
    return list(itertools.islice(llm.generate(range(10, 60), temp=0.0), 12))

expected = answer()
stream = llm.generate(range(30, 70), temp=0.0)
first = next(stream)
child = os.fork()
if not child:
    signal.alarm(150)
    os._exit(0 if answer() == expected else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
next(stream)
print(status, answer() == expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("slots", [1, 2])
def test_a_forked_process_decodes_with_a_model_that_has_decoded(
    tiny_model: Callable[..., Path], slots: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tiny_model("qwen35")), str(slots)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout.split() == ["0", "True"], done.stderr
