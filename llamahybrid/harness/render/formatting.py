"""Figures as the cells of tables, the same in every rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llamahybrid.harness.report import RequestFigures

UNTOLD = "?"
"""Where a target hides it."""


def counted(number: int | None) -> str:
    """A count of tokens."""
    return UNTOLD if number is None else f"{number:,}"


def ratio(value: float | None) -> str:
    """Decoded over least."""
    return UNTOLD if value is None else f"{value:.2f}"


def length(scale: float) -> str:
    """Say that a workload was shortened; empty where it was not."""
    return "" if scale == 1.0 else f" (at {scale:.0%} of its length)"


def answers(requests: Sequence[RequestFigures]) -> str:
    """How answers compare with those of a context that reused nothing, in a few letters."""
    found = Counter(request.answer for request in requests)
    if found["different"]:
        return f"{found['different']} differ"
    if found["unknown"]:
        return UNTOLD if found["unknown"] == len(requests) else f"{found['unknown']} untold"
    if found["tie"]:
        return f"{found['tie']} tied"
    return "same" if requests else UNTOLD
