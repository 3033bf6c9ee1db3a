"""The series itself: complete, in order, and every patch explained and tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamahybrid.engine import sdist, series
from llamahybrid.errors import UnknownArchitecture
from llamahybrid.hazards.catalogue import PROBES
from tests.lab.release import known_models, must_fail

HERE = Path(__file__).parent
PATCHES = HERE.parents[1] / "patches"
NEWEST = PATCHES / sdist.PIN.version
SERIES = (NEWEST / "series").read_text().split()


@pytest.mark.parametrize("release", series.releases())
def test_a_series_lists_every_patch_in_order(release):
    folder = PATCHES / release
    assert sorted(path.name for path in folder.glob("*.patch")) == (folder / "series").read_text().split()


@pytest.mark.parametrize("release", series.releases())
def test_an_older_release_has_a_part_of_the_patches_under_the_same_names(release):
    assert set(series.patches(release)) <= set(SERIES)


@pytest.mark.parametrize("name", SERIES)
def test_a_patch_has_a_header_a_test_and_a_row(name):
    header = (NEWEST / name).read_text().partition("\ndiff --git")[0]
    for field in ("Subject: ", "Description: ", "Origin: ", "Forwarded: ", "Last-Update: "):
        assert f"\n{field}" in header
    number = name[:4]
    probed = any(number in probe.patches and probe.stock is not probe.patched for probe in PROBES)
    assert probed or list(HERE.parent.glob(f"*/test_{number}_*.py"))
    assert f"\n| {number} " in (PATCHES / "README.md").read_text()


def test_a_test_must_fail_where_a_patch_that_it_needs_is_not_in_the_series():
    """Not to be skipped: once the patch is carried back, its tests pass, and that is told."""
    assert must_fail(["0009", "0028"], patched="lib", release=sdist.PIN.version) is None
    assert must_fail(["0001", "0029"], patched="lib", release="0.3.35") is None
    mark = must_fail(["0029", "0028", "0009"], patched="lib", release="0.3.35")
    assert mark.kwargs["reason"] == "the patches for 0.3.35 have no 0009, 0028"
    assert mark.kwargs["strict"]
    assert must_fail(["0001"], patched="", release=sdist.PIN.version).kwargs["strict"]


def test_an_unknown_model_is_skipped_on_another_release_alone():
    def make(installed, text):
        with known_models(installed):
            raise UnknownArchitecture(text)

    unknown = "error loading model: unknown model architecture: 'dots3note'"
    with pytest.raises(pytest.skip.Exception, match=r"0\.3\.35: .*dots3note"):
        make("0.3.35", unknown)
    for installed, text in ((sdist.PIN.version, unknown), ("0.3.35", "a tensor is missing")):
        with pytest.raises(UnknownArchitecture):
            make(installed, text)
