"""Commands that start other processes leave nothing behind when a signal ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.children import ended_in_order, ending, python

pytestmark = pytest.mark.xdist_group("serial")

PRINTS = "import sys\nprint(__name__, sys.argv[1:], __import__('json').__file__ is None)\n"


def test_module_of_the_working_folder_hides_no_installed_one(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    (tmp_path / "json").mkdir()
    (tmp_path / "json/__init__.py").write_text("raise RuntimeError('not built')")
    command = [*python("prints"), "a", "b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ ['a', 'b'] False\n"


WAITS = """
import signal, sys, tempfile
from llamahybrid.children import ended_in_order
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children ignore it
with ended_in_order(), tempfile.TemporaryDirectory(dir=sys.argv[1]):
    print("there", flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_removes_temporary_files_before_the_process_ends(
    number: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert not list(tmp_path.iterdir())


def test_ignored_signal_stays_ignored_and_handlers_are_restored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("status", "said"), [(7, "exit status 7"), (-6, "SIGABRT"), (-11, "SIGSEGV"), (-250, "signal 250")]
)
def test_end_of_a_child_is_named(status: int, said: str) -> None:
    assert ending(status) == said
