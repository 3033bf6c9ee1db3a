"""Figures as cells of tables, the same in every rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llamahybrid.harness.report import RequestFigures

UNTOLD = "?"
"""A number that the target hides."""


def counted(number: int | None) -> str:
    """Return a count of tokens."""
    return UNTOLD if number is None else f"{number:,}"


def ratio(value: float | None) -> str:
    """Return decoded over least."""
    return UNTOLD if value is None else f"{value:.2f}"


def length(scale: float) -> str:
    """Return a note on a shortened workload; empty for others."""
    return "" if scale == 1.0 else f" (at {scale:.0%} of its length)"


def answers(requests: Sequence[RequestFigures]) -> str:
    """Return the comparison of answers with a context that reused nothing, in a few letters."""
    found = Counter(request.answer for request in requests)
    if found["different"]:
        return f"{found['different']} differ"
    if found["unknown"]:
        return UNTOLD if found["unknown"] == len(requests) else f"{found['unknown']} untold"
    if found["tie"]:
        return f"{found['tie']} tied"
    return "same" if requests else UNTOLD
