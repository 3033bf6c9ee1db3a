"""The series itself: complete, in order, and every patch explained and tested."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from llamahybrid.engine import sdist, series
from llamahybrid.harness.hazards.catalogue import PROBES
from tests.lab.patched_library import marks

HERE = Path(__file__).parent
HOME = HERE.parents[1] / "patches" / sdist.PIN.version
SERIES = list(series.patches(sdist.PIN.version))


def test_the_series_lists_every_patch_set_by_set_in_order():
    assert [name for name, _ in groupby(map(series.set_of, SERIES))] == ["reuse", "server", "hardening"]
    for folder in ("reuse", "server", "hardening"):
        there = sorted(path.relative_to(HOME).as_posix() for path in (HOME / folder).iterdir())
        assert [name for name in SERIES if series.set_of(name) == folder] == there


@pytest.mark.parametrize("chosen", [series.REUSE, series.SERVER, series.HARDENING, None])
def test_every_choice_of_sets_applies_exactly(tmp_path, chosen):
    tree = sdist.unpack(tmp_path / "tree") / "vendor/llama.cpp"
    series.apply(tree, sdist.PIN.version, chosen)


@pytest.mark.parametrize("name", SERIES)
def test_a_patch_has_a_header_a_test_and_a_row(name):
    header = (HOME / name).read_text().partition("\ndiff --git")[0]
    for field in ("Subject: ", "Description: ", "Origin: ", "Forwarded: ", "Last-Update: "):
        assert f"\n{field}" in header
    number = series.number(name)
    mended = [probe for probe in PROBES if number in probe.patches]
    probed = any(probe.known[probe.model].stock is not probe.known[probe.model].patched for probe in mended)
    assert probed or list(HERE.parent.glob(f"*/test_{number}_*.py"))
    assert f"\n| {number} " in (HOME.parent / "README.md").read_text()


def test_a_test_must_fail_where_the_library_lacks_a_patch_that_it_needs():
    assert marks(["0009", "0028"], frozenset({"0009", "0028"})) == []
    expected, full = marks(["0009", "0028"], frozenset({"0009"}))
    assert expected.kwargs["strict"]
    assert expected.kwargs["reason"] == "the library has no 0028"
    assert full.name == "full"
