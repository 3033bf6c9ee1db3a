"""What became of the tokens of a request, as the parts of one bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from llamahybrid.harness.report import RequestFigures, whose


@dataclass(frozen=True)
class Bar:
    """Tokens of one request; what is not known is not in it."""

    label: str
    reused: int
    """Of the prompt, not decoded."""
    again: int
    """Decoded although they had been decoded before, in the same place."""
    needed: int
    """Decoded because nobody could have spared them: what was new, and the answer."""

    @property
    def length(self) -> int:
        """All of it."""
        return self.reused + self.again + self.needed

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Where each part that there is of it begins, and how long it is."""
        parts = {"reused": self.reused, "again": self.again, "needed": self.needed}
        starts = accumulate(parts.values(), initial=0)
        return {part: (start, parts[part]) for part, start in zip(parts, starts, strict=False) if parts[part]}

    @property
    def text(self) -> str:
        """In words."""
        again = f", {self.again:,} decoded again" if self.again else ""
        return f"{self.label}: {self.reused:,} reused{again}, {self.needed:,} had to be decoded"


def bar(request: RequestFigures, label: str) -> Bar | None:
    """The bar of a request; None where the target tells neither what it reused nor what it decoded."""
    total, cached, decoded = request.total, request.cached, request.decoded
    if total is None or (cached is None and decoded is None):
        return None
    reused = max(0, total - (decoded or 0)) if cached is None else cached
    decoded = max(0, total - reused) if decoded is None else decoded
    # The last token of a prompt is decoded even where it is known: its logits are sampled from.
    known = min(request.matched or 0, total - 1)
    again = min(decoded, max(0, known - reused))
    return Bar(label, reused, again, decoded - again)


def labels(requests: Sequence[RequestFigures]) -> list[str]:
    """Names for the requests of a workload: the turn, and whose where there are several chats."""
    several = len({request.chat for request in requests}) > 1
    return [f"{whose(r.chat)}, turn {r.turn + 1}" if several else f"turn {r.turn + 1}" for r in requests]
