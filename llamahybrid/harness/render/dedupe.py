"""Grouping of requests whose misses differ in numbers and quoted texts alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llamahybrid.harness.report import RequestFigures, place

_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
_NUMBER = re.compile(r"\d[\d,]*")
_COUNTED = re.compile(r"\b(token|character|chat)s\b")


@dataclass(frozen=True)
class Alike:
    """Requests with the same miss, apart from numbers and quoted texts."""

    first: RequestFigures
    requests: int
    workloads: int

    @property
    def where(self) -> str:
        """Chat and turn of the first request, within its workload."""
        first = place(self.first)
        return first if self.requests == 1 else f"{self.requests} requests alike, the first of them {first}"

    @property
    def text(self) -> str:
        """Workload, chat, turn and miss of the first request."""
        where = f"{self.first.workload}, {place(self.first)}"
        if self.requests == 1:
            return f"{where}: {self.first.miss}"
        among = "" if self.workloads == 1 else f" of {self.workloads} workloads"
        return f"{self.requests} requests{among} alike, the first of them {where}: {self.first.miss}"


def alike(requests: Iterable[RequestFigures]) -> list[Alike]:
    """Return groups of requests with a miss, the largest first."""
    groups: dict[str, list[RequestFigures]] = {}
    for request in requests:
        if request.miss:
            groups.setdefault(_kind(request.miss), []).append(request)
    found = [Alike(group[0], len(group), len({each.workload for each in group})) for group in groups.values()]
    return sorted(found, key=lambda each: -each.requests)


def _kind(sentence: str) -> str:
    """Return a sentence without numbers and quoted texts."""
    return _COUNTED.sub(r"\1", _NUMBER.sub("#", _QUOTED.sub("''", sentence)))
