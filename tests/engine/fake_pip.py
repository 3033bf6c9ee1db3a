"""Fakes of pip: an index with a small sdist, and a build by a script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamahybrid.engine import sdist

FILES = {"pyproject.toml": b"[project]\n", "vendor/llama.cpp/models/a.gguf": b"GGUF" * 100}


class Index:
    """A fake `pip download` that counts its calls."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked = 0
        self.failure = ""

    def run(self, command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.asked += 1
        if self.failure:
            return subprocess.CompletedProcess(command, 1, "", self.failure)
        wanted = Path(command[-1]).read_text()
        assert "--require-hashes" in command
        assert sdist.PIN.sha256 in wanted
        Path(command[command.index("--dest") + 1], sdist.PIN.archive).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def litter(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".part-")]


def pip_that(monkeypatch: pytest.MonkeyPatch, script: str) -> list[subprocess.Popen[str]]:
    """Replace `pip wheel` by a short Python script; its argument is the wheel folder."""
    start, started = subprocess.Popen, []

    def popen(command: list[str], **options: object) -> subprocess.Popen[str]:
        out = command[command.index("--wheel-dir") + 1]
        started.append(start([sys.executable, "-c", script, out], **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


BUILDS = """
import pathlib, sys
sys.stdout.buffer.write(b"no \\xff text\\n")
print("  [1/2] one", flush=True)
print("  [2/2] two", flush=True)
out = pathlib.Path(sys.argv[1])
out.mkdir()
(out / "llama_cpp_python-9.9.9-py3-none-any.whl").write_text("wheel")
"""
