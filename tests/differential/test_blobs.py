"""Damaged and foreign state in small: `lab.blob_fuzz` finds nothing wrong that was taken."""

import os

import pytest

from tests.lab import blob_fuzz
from tests.lab.blob_fuzz import batch, through_api

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
