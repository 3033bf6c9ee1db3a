"""Figures of targets during a run, and the report of a run that is finished, stopped or out of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llamahybrid.harness.report import Report, TargetFigures, Verdict, WorkloadFigures
from llamahybrid.harness.targets.base import ModelFile, Target

QUICKLY = 1.0
"""Seconds that processes have to end after Ctrl-C."""

LATE = "the time was over (see --minutes)"


def left_out(name: str, why: str, bound: float | None = None) -> WorkloadFigures:
    """Return the figures of a workload that did not run."""
    verdict = Verdict("runs", "cannot tell", f"it did not run: {why}")
    return WorkloadFigures(name, bound=bound, verdicts=(verdict,))


@dataclass
class _Found:
    workloads: dict[str, WorkloadFigures] = field(default_factory=dict)
    hazards: tuple[Verdict, ...] = ()
    errors: list[str] = field(default_factory=list)


@dataclass
class Collector:
    """Figures of each target by workload; `found` is called with the report so far after each change."""

    targets: Sequence[Target]
    models: Sequence[ModelFile]
    found: Callable[[Report], None] = field(default=lambda report: None)
    settings: dict[str, str] = field(default_factory=dict)
    _by_target: dict[str, _Found] = field(default_factory=dict, init=False)

    def _of(self, target: Target) -> _Found:
        return self._by_target.setdefault(target.name, _Found())

    def put(self, target: Target, figures: WorkloadFigures, model: ModelFile | None = None) -> None:
        """Add a workload or replace it; with several models its name begins with `model`'s."""
        if model is not None and len(self.models) > 1:
            name = f"{model.name}: {figures.workload}"
            requests = tuple(replace(each, workload=name) for each in figures.requests)
            figures = replace(figures, workload=name, requests=requests)
        self._of(target).workloads[figures.workload] = figures
        self.found(self.report(complete=False))

    def fail(self, target: Target, error: str) -> None:
        """Add the reason why a target did not run to its end."""
        self._of(target).errors.append(error)

    def put_hazards(self, target: Target, hazards: Sequence[Verdict]) -> None:
        """Set the verdicts on a target's library."""
        self._of(target).hazards = tuple(hazards)

    def report(self, complete: bool) -> Report:
        """Return the report of the targets that were started."""
        begun: Mapping[str, _Found] = self._by_target
        figures = [
            TargetFigures(
                target.name,
                target.kind,
                target.versions(),
                tuple(found.workloads.values()),
                found.hazards,
                "; ".join(found.errors) or None,
            )
            for target in self.targets
            if (found := begun.get(target.name)) is not None
        ]
        return Report.now(figures, [model.name for model in self.models], complete, self.settings)

    def run(self, steps: Callable[[], bool]) -> Report:
        """Call `steps`, which returns False if it ended early; return the report.

        KeyboardInterrupt and SystemExit end the steps and the targets' processes, and give the report so far.
        """
        try:
            complete = steps()
        except (KeyboardInterrupt, SystemExit):
            complete = False
            for target in self.targets:
                target.close(QUICKLY)
        return self.report(complete)
