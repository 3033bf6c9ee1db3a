"""The series itself: complete, in order, and every patch explained and tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamahybrid.hazards.catalogue import PROBES

HERE = Path(__file__).parent
PATCHES = HERE.parents[1] / "patches"
SERIES = (PATCHES / "series").read_text().split()


def test_the_series_lists_every_patch_in_order():
    assert sorted(path.name for path in PATCHES.glob("*.patch")) == SERIES


@pytest.mark.parametrize("name", SERIES)
def test_a_patch_has_a_header_a_test_and_a_row(name):
    header = (PATCHES / name).read_text().partition("\ndiff --git")[0]
    for field in ("Subject: ", "Description: ", "Origin: ", "Forwarded: ", "Last-Update: "):
        assert f"\n{field}" in header
    number = name[:4]
    probed = any(number in probe.patches and probe.stock is not probe.patched for probe in PROBES)
    assert probed or list(HERE.parent.glob(f"*/test_{number}_*.py"))
    assert f"\n| {number} " in (PATCHES / "README.md").read_text()
