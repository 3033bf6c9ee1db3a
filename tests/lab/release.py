"""Which patches the release under test has: a test of one that it lacks must fail there, as it does on stock.

Older releases of llama-cpp-python have a part of the series (docs/releases.md). The marks are strict: a patch
that is carried back later makes its tests pass, and that is then told.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from llamahybrid.engine import bindings, sdist, series
from llamahybrid.errors import UnknownArchitecture

PATCHED = os.environ.get("LLAMAHYBRID_TEST_LIB", "")
"""The folder of the patched library; empty: this run is about stock."""
INSTALLED = (bindings.version() or "").partition("+")[0]
"""The llama-cpp-python that is installed."""
RELEASE = series.release(INSTALLED)
"""Whose patches the patched library has."""


def lacking(numbers: Iterable[str], release: str = RELEASE) -> list[str]:
    """Those of the patches (0009, ...) that a release's series does not have."""
    there = {name[:4] for name in series.patches(release)}
    return sorted(set(numbers) - there)


def must_fail(
    numbers: Iterable[str], *, patched: str = PATCHED, release: str = RELEASE
) -> pytest.MarkDecorator | None:
    """The mark of a test that passes only with all of these patches; None where it is to pass."""
    if not patched:
        reason = "what the patch is for"
    elif lacks := lacking(numbers, release):
        reason = f"the patches for {release} have no {', '.join(lacks)}"
    else:
        return None
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


@contextmanager
def known_models(installed: str = INSTALLED) -> Iterator[None]:
    """Skip a test whose model's architecture another release's llama.cpp does not know; ours knows all."""
    try:
        yield
    except UnknownArchitecture as error:
        if installed == sdist.PIN.version or "unknown model architecture" not in str(error):
            raise
        pytest.skip(f"llama-cpp-python {installed}: {error}")
