"""Changes of times from one report to another, on machines with varying load.

A time alone says nothing of a build, because load varies. A cache shortens the time to the first token; the
rest of the same answer, moments later, measures the load. For each request that decoded as many tokens in
both runs,

    s = log(new / old) of the time to the first token - log(new / old) of the rest of the answer

Load may slow prefill and generation differently, but for all targets alike: s is compared with that of
another target of the same two runs whose versions did not change (a control): d = s - median of the
controls' s.

A burst of load covers many requests in a row, so requests are no independent samples. Workloads nearly are:
the median of d over a workload is one sample, and a sign test over workloads decides, at `LEVEL`. Nothing is
assumed of the distribution of times, and an outlier has one vote. In addition the median over workloads has
to be beyond `FACTOR`. With fewer workloads than can pass the test, or without a control, there is no verdict.
Slower generation, and a build that is slower at everything, are not detected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from llamahybrid.harness.report import Report, RequestFigures, TargetFigures

FACTOR = 1.3
"""Times that changed by less are not reported."""
LEVEL = 0.01
"""Significance level of the two-sided sign test; at least 8 workloads have to agree."""

_Key: TypeAlias = tuple[str, str, int]
_Pair: TypeAlias = tuple[TargetFigures, TargetFigures]


@dataclass(frozen=True)
class Drift:
    """A target became slower or faster beside the others."""

    target: str
    factor: float
    """Above 1: slower."""
    agree: int
    """Workloads with a change in this direction."""
    workloads: int
    controls: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the change in words."""
        said = f"{self.factor:.2f} times {'as long' if self.factor > 1 else 'what it was'}"
        beside = ", ".join(self.controls)
        return (
            f"time to the first token, beside the rest of the answer and {beside}: {said}, "
            f"in {self.agree} of {self.workloads} workloads"
        )


def drifts(old: Report, new: Report) -> Iterator[Drift]:
    """Yield the targets that became slower or faster, as far as that is significant."""
    before = {target.name: target for target in old.targets}
    pairs = [(before[target.name], target) for target in new.targets if target.name in before]
    controls = [pair for pair in pairs if _control(pair)]
    judged = [pair for pair in pairs if pair not in controls]
    if not controls:  # the same builds of one kind: each beside the others
        controls = [pair for pair in pairs if pair[0].versions == pair[1].versions]
        judged = pairs
    for pair in judged:
        yield from _drift(pair, [each for each in controls if each is not pair])


def _control(pair: _Pair) -> bool:
    """Tell whether a target is stock of unchanged versions."""
    return pair[0].kind == pair[1].kind == "stock" and pair[0].versions == pair[1].versions


def _drift(pair: _Pair, controls: Sequence[_Pair]) -> Iterator[Drift]:
    own, others = _logs(*pair), [_logs(*control) for control in controls]
    samples = []
    for workload, requests in own.items():
        known = [other[workload] for other in others if workload in other]
        beside = [
            value - median(other[key] for other in known if key in other)
            for key, value in requests.items()
            if any(key in other for other in known)
        ]
        if beside:
            samples.append(median(beside))
    if not samples:
        return
    middle = median(samples)
    agree = sum(sample > 0 if middle > 0 else sample < 0 for sample in samples)
    if abs(middle) > math.log(FACTOR) and sign_test(agree, len(samples)) <= LEVEL:
        names = tuple(control.name for _, control in controls)
        yield Drift(pair[1].name, math.exp(middle), agree, len(samples), names)


def sign_test(agree: int, samples: int) -> float:
    """Probability that as many of `samples`, or more, have one sign if both are as likely; two-sided."""
    tail = sum(math.comb(samples, k) for k in range(max(agree, samples - agree), samples + 1))
    return min(1.0, float(2 * tail / 2**samples))


def _logs(old: TargetFigures, new: TargetFigures) -> dict[str, dict[_Key, float]]:
    """Return s by workload and request, of the requests that did the same work."""
    before = {(r.workload, r.chat, r.turn): r for w in old.workloads for r in w.requests}
    found: dict[str, dict[_Key, float]] = {}
    for workload in new.workloads:
        for request in workload.requests:
            key = (request.workload, request.chat, request.turn)
            other = before.get(key)
            if other is None or (other.total, other.decoded) != (request.total, request.decoded):
                continue
            was, now = _relative(other), _relative(request)
            if was is not None and now is not None:
                found.setdefault(workload.workload, {})[key] = now - was
    return found


def _relative(request: RequestFigures) -> float | None:
    """Return the log of the time to the first token over the rest of the answer; None: unknown."""
    if not request.ttft or request.seconds <= request.ttft:
        return None
    return math.log(request.ttft / (request.seconds - request.ttft))
