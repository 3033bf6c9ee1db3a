"""A forked process: it has the tables of OpenMP teams of its parent, whose threads it has not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("serial")]

OPENING = """
import itertools, os, signal, sys, threading
from llamahybrid import Llama
from llamahybrid.errors import RequestSuperseded

options = {"n_ctx": 512, "n_batch": 64, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
llm = Llama(sys.argv[1], n_parallel=int(sys.argv[2]), **options)

def begun(prompt):
    if sys.argv[3] == "greedy":
        return llm.generate(prompt, temp=0.0)
    drawn = {"temperature": 9.0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "logit_bias": {llm.token_eos(): -100}}
    return (e["choices"][0]["text"] for e in llm(list(prompt), max_tokens=12, stream=True, **drawn))

def answer(prompt):
    return list(itertools.islice(begun(prompt), 12))

def child(status):
    pid = os.fork()
    if not pid:
        signal.alarm(150)
        try:
            os._exit(status())
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

"""

STREAM = """
one, two = range(10, 60), range(30, 70)
expected, whole = answer(one), answer(two)
stream = begun(two)
first = next(stream)
while sys.argv[3] == "drawn" and not any(len(r.progress.said) > 1 for r in llm.slots.seated):
    os.sched_yield()  # until the loop has sampled ahead of this reader

def goes_on():
    return [first, *itertools.islice(stream, 11)] == whole

def wrong(goes_on):
    return not (goes_on and answer(one) == expected)

codes = child(lambda: wrong(goes_on())), child(lambda: wrong(stream.close() is None))
print(*codes, goes_on(), answer(one) == expected)
"""


BUSY = """
from llamahybrid.capi.calls import NativeContext

one = range(10, 60)
expected, inside, runs, decode = answer(one), [], threading.Event(), NativeContext.decode_parts

def observed(*args):
    inside.append(True)
    runs.set()
    try:
        return decode(*args)
    finally:
        inside.pop()

NativeContext.decode_parts = observed

def talk():
    for number in itertools.count():
        if done.is_set():
            return
        answer([number % 200, *range(20, 250)])

def forked_in_a_batch():
    runs.clear()
    runs.wait(60)
    return child(lambda: 1 if inside else 0 if answer(one) == expected else 3)

done = threading.Event()
talking = threading.Thread(target=talk)
talking.start()
codes = {forked_in_a_batch() for _ in range(8)}
done.set()
talking.join()
print(*codes, answer(one) == expected)
"""


CALLS_ANOTHER = """
other, asked, done = Llama(sys.argv[1], **options), threading.Event(), threading.Event()

def handler(llama, messages, **_):
    while not done.is_set():
        other.create_completion([*range(10, 250)], max_tokens=1)
    return {}

def right():
    return [next(llm.generate(range(10, 60), temp=0.0)), next(other.generate(range(10, 60), temp=0.0))]

expected = right()
other.on_progress = lambda _: asked.set()
llm.chat_handler = handler
chat = threading.Thread(target=llm.create_chat_completion, args=([],))
chat.start()
codes = set()
for _ in range(4):
    asked.clear()
    asked.wait(60)
    codes.add(child(lambda: right() != expected))
done.set()
chat.join()
print(*codes, right() == expected)
"""


HANDLER = """
prompt = [10 + (7 * i) % 100 for i in range(400)]
child, forked = None, threading.Event()

def fork(*_):
    global child
    child = os.fork()
    if not child:
        signal.alarm(150)
    forked.set()

def signalled(_):
    if not forked.is_set():
        os.kill(os.getpid(), signal.SIGUSR1)
        forked.wait()

signal.signal(signal.SIGUSR1, fork)
llm.on_progress = signalled
try:
    first = answer(prompt)
except RequestSuperseded:
    os._exit(0 if child == 0 and len(answer(prompt[:100])) == 12 else 1)
if child == 0:
    os._exit(2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, answer(prompt) == first)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    ("script", "way", "told"),
    [
        (STREAM, "greedy", ["0", "0", "True", "True"]),
        (STREAM, "drawn", ["0", "0", "True", "True"]),
        (BUSY, "greedy", ["0", "True"]),
        (CALLS_ANOTHER, "greedy", ["0", "True"]),
        (HANDLER, "greedy", ["0", "True"]),
    ],
    ids=[
        *("a stream", "a drawn stream", "another thread's batch", "a chat handler that calls another model"),
        "a signal handler in a wait",
    ],
)
def test_forked_processes_and_their_parent_go_on_with_one_model(
    tiny_model: Callable[..., Path], slots: int, script: str, way: str, told: list[str]
) -> None:
    """A wait that is forked ends in the child, and a stream goes on there with the same tokens.

    A fork waits for the batch that runs.
    """
    command = [sys.executable, "-c", OPENING + script, str(tiny_model("qwen35")), str(slots), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == told
    assert ("did not wait" in done.stderr) is (script is HANDLER)  # whose loop waits for the fork


LOOPS = """
import os, signal, sys, threading
from llamahybrid.core import process

class There(threading.Event):
    def wait(self, timeout=None):
        if number := numbers.pop() if numbers else 0:
            signal.raise_signal(number)
        return super().wait(timeout)

class Loop:
    awaits_another = False

    def hold(self, over):
        asked.append(There())
        if len(asked) in wanted:
            for each in asked:
                each.set()
        return asked[-1]

    def renew_in_child(self):
        pass

    def end_at_exit(self):
        pass

signal.signal(signal.SIGINT, signal.default_int_handler)
asked, numbers, wanted, interrupted = [], [], {2}, False
loops = Loop(), Loop()
for each in loops:
    process.add(each)

def forked():
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)

"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize(
    ("script", "told", "warnings"),
    [
        ("forked()", "2 False", 0),
        ("process.FORK_SECONDS, wanted = 0.1, ()\nforked()", "2 False", 1),
        (
            "wanted, numbers, until = (), [signal.SIGINT], threading.Event()\n"
            "process.FORK_SECONDS = 0.1\n"
            "try:\n    forked()\n    until.wait(60)\nexcept KeyboardInterrupt:\n    interrupted = True",
            "2 True",
            1,
        ),
    ],
    ids=["each is there once all are asked", "none is ever there", "Ctrl-C"],
)
def test_a_fork_asks_all_loops_before_it_waits_for_any(script: str, told: str, warnings: int) -> None:
    """After the longest wait it says so once; Ctrl-C in the wait is one behind the fork."""
    command = [sys.executable, "-c", LOOPS + script + "\nprint(len(asked), interrupted)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == told, done.stderr
    assert done.stderr.count("did not wait") == warnings
