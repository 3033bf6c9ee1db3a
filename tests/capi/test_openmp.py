"""OpenMP's teams are found where libllama has GNU's, and end when they are told to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamahybrid import Llama
from llamahybrid.capi import openmp

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


@pytest.fixture
def found(monkeypatch):
    """`found(*names)`: what is found in a library that has these functions."""

    def find(*names):
        library = SimpleNamespace(**{name: lambda *a: None for name in names})
        monkeypatch.setattr(openmp.llama_cpp, "_lib", library)
        return openmp.team_ender.__wrapped__()

    return find


def test_only_gnus_is_known(found):
    assert found() is None
    assert found("GOMP_parallel") is None
    assert found("omp_pause_resource_all") is None
    assert found("GOMP_parallel", "omp_pause_resource_all", "__kmpc_fork_call") is None
    assert found("GOMP_parallel", "omp_pause_resource_all") is not None


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


def test_a_thread_that_made_a_request_keeps_no_team_but_the_main_one_does(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    here = threading.current_thread

    def end() -> None:
        ended.append(here().name)

    monkeypatch.setattr(openmp, "team_ender", lambda: end)
    with closing(Llama(str(tiny_model("llama")), n_ctx=128, verbose=False)) as llm:
        llm("one two three", max_tokens=3)
        assert ended == []
        workers = [
            threading.Thread(target=llm, args=("one two four",), kwargs={"max_tokens": 3}, name=f"worker {i}")
            for i in range(2)
        ]
        for worker in workers:
            worker.start()
            worker.join()
        assert ended == ["worker 0", "worker 1"]
