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


@pytest.mark.native
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
