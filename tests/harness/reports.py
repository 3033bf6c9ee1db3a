"""Reports for tests, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamahybrid.harness.report import Report, RequestFigures, TargetFigures, Verdict, WorkloadFigures


def request(workload: str = "chat", turn: int = 0, **more: Any) -> RequestFigures:
    """Half of the prompt was known and reused."""
    figures: dict[str, Any] = dict(total=100, matched=50, cached=50, decoded=60, ttft=0.1, seconds=0.3)
    figures |= {"chat": "0", "answer": "same", "text_hash": "x", "miss": None}
    return RequestFigures(workload=workload, turn=turn, **{**figures, **more})


def verdict(name: str = "reuse", outcome: Any = "ok", detail: str = "ratio 1.00") -> Verdict:
    return Verdict(name, outcome, detail)


def workload(name: str = "chat", turns: int = 4, **more: Any) -> WorkloadFigures:
    figures: dict[str, Any] = dict(least=60 * turns, decoded=60 * turns, ratio=1.0, bound=1.02)
    figures["requests"] = tuple(request(name, turn) for turn in range(turns))
    figures["verdicts"] = (verdict(), verdict("exact"))
    return WorkloadFigures(workload=name, **{**figures, **more})


def target(name: str = "ours", *workloads: WorkloadFigures, **more: Any) -> TargetFigures:
    figures: dict[str, Any] = dict(kind=name, versions={"llama-cpp-python": "0.3.36"}, hazards=(), error=None)
    return TargetFigures(name, workloads=workloads or (workload(),), **{**figures, **more})


def report(*targets: TargetFigures, models: Sequence[str] = ("qwen35",)) -> Report:
    made, machine = "2026-01-02T03:04:05+00:00", {"system": "Linux", "cores": "2"}
    return Report(made, machine, tuple(models), targets or (target(),))
