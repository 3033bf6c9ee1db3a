"""Assertions on reports of the harness, for regression tests; the pytest plugin's fixtures make the reports.

Missing information fails an assertion, with a message: no assertion passes without data.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llamahybrid.harness.report import PROBE, place

if TYPE_CHECKING:
    from llamahybrid.harness.report import Report, TargetFigures, WorkloadFigures


def assert_reuse(report: Report, at_least: float) -> None:
    """Assert that `at_least` (0 to 1) of the known prompt tokens were reused in each workload.

    Raises:
        AssertionError: fewer were; a target stopped, hides or misreports reused tokens; or there was
            nothing to reuse.
    """
    for target in _ran(report):
        if all(PROBE in workload.workload for workload in target.workloads):
            raise AssertionError(f"{target.name}: no workload ran but probes, which measure nothing")
        for workload in target.workloads:
            where = f"{target.name}, {workload.workload}"
            for verdict in workload.verdicts:
                if (verdict.name, verdict.outcome) == ("reports-what-it-reused", "bad"):
                    raise AssertionError(f"{where}: what it reports is not so: {verdict.detail}")
            if PROBE not in workload.workload:  # directed probes have parts that cannot be reused
                _reused(workload, at_least, where)


def _reused(workload: WorkloadFigures, at_least: float, where: str) -> None:
    known = reused = 0
    for request in workload.requests:
        if request.total is None or request.matched is None or request.cached is None:
            raise AssertionError(f"{where}: cannot tell: the target hides what it reused")
        # The last token of a known prompt is decoded for its logits.
        most = max(0, min(request.matched, request.total - 1))
        known += most
        reused += min(most, request.cached)
    if not known:
        raise AssertionError(f"{where}: no prompt began as an earlier one did, so there was nothing to reuse")
    if reused < at_least * known:
        misses = [f"{place(request)}: {request.miss}" for request in workload.requests if request.miss]
        raise AssertionError(
            f"{where}: {reused:,} of {known:,} known tokens were reused ({reused / known:.0%}), "
            f"at least {at_least:.0%} should be" + "".join(f"\n  {miss}" for miss in misses[:5])
        )


def assert_same_answer(report: Report, *, allow_unknown: bool = False) -> None:
    """Assert that each answer is that of a context that reused nothing, or a tie.

    With `allow_unknown`, answers that could not be compared are ignored.

    Raises:
        AssertionError: an answer differs; none, or not each, could be compared; a target stopped.
    """
    for target in _ran(report):
        compared = 0
        for workload in target.workloads:
            for request in workload.requests:
                where = f"{target.name}, {workload.workload}, {place(request)}"
                if request.answer == "different":
                    raise AssertionError(f"{where}: the answer is not that of a context that reused nothing")
                told = request.answer in ("same", "tie")
                if not told and not allow_unknown:
                    raise AssertionError(f"{where}: cannot tell whether the answer is right")
                compared += told
        if not compared:
            raise AssertionError(f"{target.name}: no answer could be compared")


def assert_sound(lib: Path | None, *hazards: str) -> None:
    """Assert that no hazard (all, or those of these ids) hits the libllama at `lib`; None: llama_cpp's.

    `lib` is a file or folder. Verdicts are those of `llamahybrid hazards`: a hazard that the patches of an
    engine of ours do not cure is ignored beside others. Each runs in a process of its own; all take about a
    minute.

    Raises:
        AssertionError: a hazard hits, or its probe failed; or none applies there.
        EngineError: `lib` cannot be loaded.
        ValueError: an id is not known.
    """
    from llamahybrid.harness.hazards import runner
    from llamahybrid.harness.hazards.catalogue import PROBES, find

    found = runner.report([find(name) for name in hazards] or PROBES, runner.library(lib))
    if not found.complete:
        raise KeyboardInterrupt
    (target,) = found.targets
    bad = [verdict for verdict in target.hazards if verdict.outcome == "bad"]
    if bad:
        lines = [f"\n  {v.name}: {v.detail.splitlines()[0]}" for v in bad]
        many = f"{len(bad)} of {len(target.hazards)} hazards"
        raise AssertionError(f"{many} hit {lib or 'llama_cpp'}:{''.join(lines)}")
    if target.error is not None or not any(verdict.outcome == "ok" for verdict in target.hazards):
        said = "; ".join(f"{v.name}: {v.detail.splitlines()[0]}" for v in target.hazards[:5])
        raise AssertionError(f"cannot tell whether {lib or 'llama_cpp'} is sound: {target.error or said}")


def _ran(report: Report) -> tuple[TargetFigures, ...]:
    """Return the targets. Raises AssertionError unless each ran to its end with requests in each workload."""
    for target in report.targets:
        if target.error is not None:
            raise AssertionError(f"{target.name} did not run to its end: {target.error}")
        if not any(workload.requests for workload in target.workloads):
            raise AssertionError(f"{target.name} was asked nothing")
        for each in target.workloads:
            if not each.requests and PROBE not in each.workload:
                said = "; ".join(verdict.detail for verdict in each.verdicts)
                raise AssertionError(f"{target.name}, {each.workload}: cannot tell: {said}")
    if not report.targets:
        raise AssertionError("there is no target in the report")
    return report.targets
