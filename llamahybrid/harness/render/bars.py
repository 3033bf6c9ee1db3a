"""The tokens of a request as a bar: reused, decoded again, new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from llamahybrid.harness.report import RequestFigures, place


@dataclass(frozen=True)
class Bar:
    """Tokens of a request."""

    label: str
    reused: int
    """Prompt tokens that were not decoded."""
    again: int
    """Known prompt tokens that were decoded again."""
    needed: int
    """New prompt tokens and the answer."""

    @property
    def length(self) -> int:
        """Sum of the parts."""
        return self.reused + self.again + self.needed

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Begin and length of each part that is not empty."""
        parts = {"reused": self.reused, "again": self.again, "needed": self.needed}
        starts = accumulate(parts.values(), initial=0)
        return {part: (start, parts[part]) for part, start in zip(parts, starts, strict=False) if parts[part]}

    @property
    def text(self) -> str:
        """The bar in words."""
        again = f", {self.again:,} decoded again" if self.again else ""
        return f"{self.label}: {self.reused:,} reused{again}, {self.needed:,} had to be decoded"


def bar(request: RequestFigures, label: str) -> Bar | None:
    """Return the bar of a request; None: the target hides reused and decoded tokens."""
    total, cached, decoded = request.total, request.cached, request.decoded
    if total is None or (cached is None and decoded is None):
        return None
    reused = max(0, total - (decoded or 0)) if cached is None else cached
    decoded = max(0, total - reused) if decoded is None else decoded
    # The last token of a known prompt is decoded for its logits.
    known = min(request.matched or 0, total - 1)
    again = min(decoded, max(0, known - reused))
    return Bar(label, reused, again, decoded - again)


def labels(requests: Sequence[RequestFigures]) -> list[str]:
    """Return names of a workload's requests: the turn, and the chat if there are several."""
    several = len({request.chat for request in requests}) > 1
    return [place(r) if several else f"turn {r.turn + 1}" for r in requests]
