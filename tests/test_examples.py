"""Every example runs as it stands, on a tiny model, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("test_"))
"""Those for pytest are run in tests/test_pytest_plugin.py."""

SAYS = {
    "cancel.py": r"ended by 'cancelled' after \d+ pieces\nasked again: 0 prompt tokens decoded\n",
    "disk.py": r"(\d+) of \1 .* from: none\n\d of \1 .* from: disk\n",
    "drafts.py": r"no draft: .*\nLlamaPromptLookupDecoding: .*\nModelDraft: .*\nthe same text each time\n",
    "drop_in.py": r".* (\d+) of \1 prompt tokens .*\n(.* (?!(\d+) of \3 )\d+ of \d+ prompt tokens .*\n){2}",
    "regression_test.py": r"(request \d: .*\n){4}decoded in all: .*\nseconds: .*\ntexts equal\n",
    "several_users.py": r"((Ada|Ben|Cleo): [1-9]\d* of \d+ tokens reused, [1-9]\d* of \d+ tokens .*\n){3}",
}
"""What an example prints, as a pattern."""


def test_each_example_is_known() -> None:
    assert [path.name for path in EXAMPLES] == sorted(SAYS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_and_says_what_it_should(
    example: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, example, tiny_model("qwen35")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(SAYS[example.name], run.stdout), run.stdout
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_its_first_lines_say_how_to_run_it(example: Path) -> None:
    assert f"\nRun: python examples/{example.name} model.gguf" in example.read_text(encoding="utf-8")
