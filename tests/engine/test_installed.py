"""Built engines: manifests and damaged files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llamahybrid.engine import activation, installed, sdist
from tests.engine.conftest import Build, mismatch


@pytest.mark.parametrize("folder", [False, True])
def test_engine_without_libraries_is_not_used(built: Build, folder: bool) -> None:
    engine = replace(built(), files={})  # as an older version wrote it
    library = next(engine.libraries.glob("*llama*"))
    library.unlink()
    if folder:
        library.mkdir()
    assert "gone" in mismatch(engine)


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


def test_manifest_with_further_fields_is_read(built: Build) -> None:
    """Earlier versions wrote the functions and the seconds of the build, too."""
    engine = built()
    manifest = engine.folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"symbols": ["f"], "seconds": 1.5}))
    assert installed.engines() == [engine]
