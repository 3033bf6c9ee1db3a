"""Processes that are started for a while: what they import, and what ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llamahybrid.children import ended_in_order, python

SAYS = "import sys\nprint(__name__, sys.argv[1:], __import__('json').__file__ is None)\n"


def test_a_module_of_the_working_folder_hides_none_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "json").mkdir()
    (tmp_path / "json/__init__.py").write_text("raise RuntimeError('not built')")
    done = subprocess.run(
        [*python("says"), "a", "b"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "__main__ ['a', 'b'] False\n"


WAITS = """
import signal, sys, tempfile, time
from llamahybrid.children import ended_in_order
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children ignore it
with ended_in_order(), tempfile.TemporaryDirectory(dir=sys.argv[1]):
    print("there", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_begun_is_ended_before_the_process_goes(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_or_taken_stays_so_and_afterwards_all_is_as_before() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_leaves_signals_alone() -> None:
    seen: list[object] = []

    def other() -> None:
        with ended_in_order():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
