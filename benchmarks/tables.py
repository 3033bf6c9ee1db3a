"""Measured comparisons as tables for people."""

from __future__ import annotations

import os
import platform

import llama_cpp
from rich.table import Table

from llamahybrid.engine import bindings


def machine() -> str:
    """The machine and the versions a measurement belongs to, in one line."""
    host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    versions = f"llama-cpp-python {llama_cpp.__version__}, llamahybrid {bindings.version('llamahybrid')}"
    return f"{host}, Python {platform.python_version()}, {versions}"


def yes(equal: bool) -> str:
    """A coloured yes or no."""
    return "[green]yes[/]" if equal else "[red]no[/]"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, readable at both ends."""
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def table_of(title: str, first: str, *numbers: str) -> Table:
    """A table whose columns but the first are numbers."""
    table = Table(first, title=title)
    for head in numbers:
        table.add_column(head, justify="right")
    return table
