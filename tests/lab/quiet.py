"""The library's own log, switched off: campaigns provoke thousands of its error lines."""

from __future__ import annotations

import llama_cpp

_SILENT = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
"""Kept for the life of the process: the library goes on calling it."""


def silence() -> None:
    """No more native log lines in this process."""
    llama_cpp.llama_log_set(_SILENT, None)
