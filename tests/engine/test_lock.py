"""A lock that goes with the process that held it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llamahybrid.engine.lock import Taken, lock

HOLD = """
import sys
from pathlib import Path
from llamahybrid.engine.lock import Taken, lock
with lock(Path(sys.argv[1]), lambda: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def unexpected() -> None:
    raise AssertionError("nobody holds it")


def test_a_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with lock(path, holder.kill) as alone:  # waits; only the end of the other lets it go on
        assert alone
        assert holder.wait(60) == -9
    with lock(path, unexpected):
        pass
    assert not path.exists()


def test_one_that_gives_up_waiting_leaves_the_lock_to_its_holder(tmp_path: Path) -> None:
    def give_up() -> None:
        raise KeyboardInterrupt

    path = tmp_path / "x.lock"
    with lock(path, unexpected):
        with pytest.raises(KeyboardInterrupt), lock(path, give_up):
            pass
        assert path.exists()
    with lock(path, unexpected):
        pass


def test_who_waited_for_a_file_that_is_gone_holds_the_one_that_is_there(tmp_path: Path) -> None:
    waits, holds, done = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with lock(tmp_path / "x.lock", waits.set):
            holds.set()
            done.wait(60)

    def taken() -> None:
        raise Taken

    thread = threading.Thread(target=second)
    with lock(tmp_path / "x.lock", unexpected):
        thread.start()
        assert waits.wait(60)
    assert holds.wait(60)
    with pytest.raises(Taken), lock(tmp_path / "x.lock", taken):
        pass
    done.set()
    thread.join()


def test_many_threads_take_turns(tmp_path: Path) -> None:
    inside: list[int] = []
    seen: list[int] = []

    def work() -> None:
        for _ in range(20):
            with lock(tmp_path / "x.lock", lambda: None):
                inside.append(1)
                seen.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 80
