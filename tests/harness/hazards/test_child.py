"""The process that runs one probe: what it prints last, and which library it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llamahybrid.engine.bindings import stock
from llamahybrid.harness.hazards.outcome import Verdict

COMMAND = (sys.executable, "-m", "llamahybrid.harness.hazards.child")


def last_line(*arguments: object, **environment: str) -> dict[str, object]:
    run = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def test_without_a_probe_it_says_which_library_the_folder_has(tmp_path: Path) -> None:
    libraries = stock()
    assert libraries is not None
    (tmp_path / "lib").symlink_to(libraries)
    said = last_line(LLAMAHYBRID_ENGINE="", LLAMA_CPP_LIB_PATH=str(tmp_path / "lib"))
    assert Path(str(said["path"])).parent == tmp_path / "lib"
    assert "CPU" in str(said["system"])


def test_what_cannot_happen_is_said_and_is_no_failure(tiny_model: Callable[..., Path]) -> None:
    said = last_line("rollback-twice", tiny_model("jamba"), 0)
    assert said["verdict"] == Verdict.NOT_APPLICABLE.value
    assert "rollback planes" in str(said["detail"])
