"""Damaged and foreign state in small: `lab.blob_fuzz` finds nothing wrong that was taken."""

import os
import random

import numpy as np
import pytest

from tests.lab import blob_fuzz
from tests.lab.blob_fuzz import batch, mutated, through_api

pytestmark = [pytest.mark.patched]
PATCHED = os.environ.get("LLAMAHYBRID_TEST_LIB", "")
SOME = [
    pytest.param(arch, marks=[] if arch in ("qwen35", "gemma3") else pytest.mark.full)
    for arch in blob_fuzz.ARCHITECTURES
]


@pytest.mark.parametrize("arch", SOME)
def test_nothing_wrong_is_taken(tiny_model, arch):
    outcomes = through_api(tiny_model(arch), seed=11, count=40)
    assert sum(outcomes.values()) == 40


if PATCHED:  # the stock library dies of such bytes

    @pytest.mark.parametrize("arch", SOME)
    def test_the_patched_library_survives_and_changes_nothing_it_refuses(tiny_model, arch, monkeypatch):
        monkeypatch.setenv("LLAMAHYBRID_ENGINE", PATCHED)
        outcomes, failure = batch("native", tiny_model(arch), 12, 100)
        assert failure == ""
        assert outcomes["refused"] > 10


def test_a_mutation_is_never_the_original():
    rng = random.Random(1)
    blob, other = np.arange(200, dtype=np.uint8), np.zeros(150, np.uint8)
    assert not any(np.array_equal(mutated(blob, other, rng), blob) for _ in range(2000))


def test_a_crash_is_a_result(tiny_model, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif '--child' in sys.orig_argv: os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, failure = batch("api", tiny_model("mamba"), 1, 10)
    assert "died of signal 6" in failure
