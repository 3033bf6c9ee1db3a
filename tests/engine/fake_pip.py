"""A fake package index with a small sdist."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

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
