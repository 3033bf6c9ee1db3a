"""Built engines: manifests and damaged files."""

from __future__ import annotations

import json

import pytest

from llamahybrid.engine import activation, installed, sdist
from tests.engine.conftest import Build


def test_folders_without_a_manifest_are_skipped(built: Build) -> None:
    built(".part-x")  # still being made
    for name, text in {"broken": "{", "foreign": "[]", "empty": "{}"}.items():
        (sdist.cache_dir() / "engines" / name).mkdir(parents=True)
        (sdist.cache_dir() / "engines" / name / "manifest.json").write_text(text)
    (sdist.cache_dir() / "engines" / "odd" / "manifest.json").mkdir(parents=True)
    (sdist.cache_dir() / "engines" / "bare").mkdir()
    assert installed.engines() == []
    assert len(installed.unreadable()) == 5
    assert all("no manifest that can be read" in problem for problem in installed.unreadable())


@pytest.mark.parametrize(
    "harm",
    [{"patches": None}, {"patches": 3}, {"built": 5}, {"version": None}, {"source": []}, {"files": [1]}],
)
def test_invalid_manifest_is_skipped(built: Build, harm: dict[str, object]) -> None:
    good, odd = built("good"), built("odd")
    manifest = odd.folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **harm}))
    assert activation.resolve("") == good.libraries
    assert installed.engines() == [good]
    assert len(installed.unreadable()) == 1
