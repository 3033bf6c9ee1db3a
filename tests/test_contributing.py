"""What CONTRIBUTING.md tells people to run and to look at is there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from llamahybrid.engine import sdist, series

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(
    set(re.findall(r"(?<![\w/.])(?:tests|docs|patches|benchmarks|llamahybrid|native)/[\w./]*", TEXT))
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path.rstrip(".")).exists()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", TEXT))))
def test_a_module_can_be_run(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations is None or find_spec(f"{module}.__main__")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)(?=[` ]| TIME)", TEXT))))
def test_a_target_is_in_the_makefile(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_next_patch_has_the_next_number() -> None:
    names = list(series.patches(sdist.PIN.version))
    assert f"--start-number {int(names[-1][:4]) + 1} " in TEXT
    assert len(PATHS) > 10
