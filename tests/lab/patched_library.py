"""Which patches the library under test has: a test of one that it lacks must fail, as it does on stock."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from llamahybrid.engine import installed, sdist, series

PATCHED = os.environ.get("LLAMAHYBRID_TEST_LIB", "")
"""The folder of the patched library; empty: this run is about stock."""


def patches_of(folder: str) -> frozenset[str]:
    """The numbers of the patches in a library; all for one that `engine build` did not make of the series."""
    if not folder:
        return frozenset()
    engine = installed.owner(Path(folder))
    names = engine.patches if engine and engine.patches else series.patches(sdist.PIN.version)
    return frozenset(map(series.number, names))


PATCHES = patches_of(PATCHED)


def marks(numbers: Iterable[str], there: frozenset[str] = PATCHES) -> list[pytest.MarkDecorator]:
    """Marks of a test that passes only with all of these patches; none where the library has them.

    Such a test must fail, which shows that it can: that is for the full suite.
    """
    if lacking := sorted(set(numbers) - there):
        reason = f"the library has no {', '.join(lacking)}"
        return [pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason), pytest.mark.full]
    return []
