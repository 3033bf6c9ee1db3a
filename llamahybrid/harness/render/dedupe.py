"""Sentences on misses that say the same of many requests, in other numbers and texts: each is said once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llamahybrid.harness.report import RequestFigures, whose

_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
_NUMBER = re.compile(r"\d[\d,]*")
_COUNTED = re.compile(r"\b(token|character|chat)s\b")


@dataclass(frozen=True)
class Alike:
    """Requests of which one sentence holds but for its numbers and the texts in it."""

    first: RequestFigures
    requests: int
    workloads: int

    @property
    def where(self) -> str:
        """Whose they are, for who knows the workload."""
        first = f"{whose(self.first.chat)}, turn {self.first.turn + 1}"
        return first if self.requests == 1 else f"{self.requests} requests alike, the first of them {first}"

    @property
    def text(self) -> str:
        """Whose they are, and the sentence as it stands on the first of them."""
        where = f"{self.first.workload}, {whose(self.first.chat)}, turn {self.first.turn + 1}"
        if self.requests == 1:
            return f"{where}: {self.first.miss}"
        among = "" if self.workloads == 1 else f" of {self.workloads} workloads"
        return f"{self.requests} requests{among} alike, the first of them {where}: {self.first.miss}"


def alike(requests: Iterable[RequestFigures]) -> list[Alike]:
    """Those that missed something, by what is said of them; what is said of most comes first."""
    groups: dict[str, list[RequestFigures]] = {}
    for request in requests:
        if request.miss:
            groups.setdefault(_kind(request.miss), []).append(request)
    found = [Alike(group[0], len(group), len({each.workload for each in group})) for group in groups.values()]
    return sorted(found, key=lambda each: -each.requests)


def _kind(sentence: str) -> str:
    """It without what differs from request to request."""
    return _COUNTED.sub(r"\1", _NUMBER.sub("#", _QUOTED.sub("''", sentence)))
