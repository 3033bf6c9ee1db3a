"""The library's log, switched off for the rest of a process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, llamahybrid, llama_cpp
if sys.argv[1] == "quiet":
    from tests.lab.quiet import silence
    silence()
llama_cpp.llama_model_load_from_file(b"/nowhere", llama_cpp.llama_model_default_params())
"""


def said(how: str) -> str:
    run = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def test_no_error_line_of_the_library_is_seen() -> None:
    assert "failed to load model" in said("loud"), "or the test proves nothing"
    assert said("quiet") == ""
