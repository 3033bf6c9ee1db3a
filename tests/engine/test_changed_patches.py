"""An engine is that of its patches' content: a patch that changes makes another one, and the old one goes."""

from __future__ import annotations

from pathlib import Path

from llamahybrid.engine import choice, patched, series
from llamahybrid.engine.choice import InstalledBindings
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.recipe import Recipe
from llamahybrid.harness.hazards.outcome import Verdict


def test_changed_patch_makes_another_engine() -> None:
    recipe = Recipe.here()
    assert patched.key(recipe, {"0001.patch": "a"}) != patched.key(recipe, {"0001.patch": "b"})
    assert patched.key(recipe, {"0001.patch": "a"}) == patched.key(recipe, {"0001.patch": "a"})


def test_engine_of_a_patch_that_changed_since_is_not_loaded(tmp_path: Path) -> None:
    version = series.releases()[-1]
    patches = series.patches(version)
    patches[next(iter(patches))] = "0" * 64
    engine = Engine(tmp_path, version, Recipe.here(), patches, "", (), "2026-01-01", 1.0)
    assert "patches have changed" in choice.mismatch(engine, InstalledBindings(version, frozenset({"cpu"})))


def test_library_that_ends_the_process_or_is_wrong_is_not_sound() -> None:
    assert not any(v.sound for v in (Verdict.DIED, Verdict.WRONG, Verdict.FAILED))
