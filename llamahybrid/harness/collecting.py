"""Figures of targets during a run, and the report of a run that is finished, stopped or out of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llamahybrid.errors import LlamaHybridError
from llamahybrid.harness.report import NOT_RUN, Report, TargetFigures, Verdict, WorkloadFigures
from llamahybrid.harness.targets.base import ModelFile, Target

QUICKLY = 1.0
"""Seconds that processes have to end after Ctrl-C."""

LATE = "the time was over (see --minutes)"


def left_out(name: str, why: str, bound: float | None = None) -> WorkloadFigures:
    """Return the figures of a workload that did not run."""
    verdict = Verdict("runs", "cannot tell", f"{NOT_RUN}{why}")
    return WorkloadFigures(name, bound=bound, verdicts=(verdict,))


def _joined(errors: Sequence[tuple[str, str]]) -> str | None:
    """Return pairs of place and error as one text, an equal error once; None: no error."""
    places: dict[str, list[str]] = defaultdict(list)
    for where, text in errors:
        places[text].append(where)
    said = [": ".join(filter(None, (", ".join(found), text))) for text, found in places.items()]
    return "; ".join(said) or None


class Collector:
    """Figures of each target by workload; `found` is called with the report so far after each change."""

    def __init__(
        self,
        targets: Sequence[Target],
        models: Sequence[ModelFile],
        found: Callable[[Report], None] = lambda report: None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.targets, self.models, self._found, self._settings = targets, models, found, settings
        self._workloads: dict[str, dict[str, WorkloadFigures]] = defaultdict(dict)
        self._hazards: dict[str, tuple[Verdict, ...]] = {}
        self._errors: dict[str, list[tuple[str, str]]] = defaultdict(list)

    def put(self, target: Target, figures: WorkloadFigures, model: ModelFile | None = None) -> None:
        """Add a workload or replace it; with several models its name begins with `model`'s."""
        if model is not None and len(self.models) > 1:
            name = f"{model.name}: {figures.workload}"
            requests = tuple(replace(each, workload=name) for each in figures.requests)
            figures = replace(figures, workload=name, requests=requests)
        self._workloads[target.name][figures.workload] = figures
        self._found(self.report(complete=False))

    def put_hazards(self, target: Target, hazards: Sequence[Verdict]) -> None:
        """Set the verdicts on a target's library."""
        self._hazards[target.name] = tuple(hazards)

    @contextmanager
    def errors(self, target: Target, where: str = "") -> Iterator[None]:
        """Report an error in the body, with the place in words, as a reason why the target stopped."""
        try:
            yield
        except LlamaHybridError as error:
            self._errors[target.name].append((where, str(error)))

    def report(self, complete: bool) -> Report:
        """Return the report of the targets that were started."""
        begun = self._workloads.keys() | self._hazards.keys() | self._errors.keys()
        figures = [
            TargetFigures(
                target.name,
                target.kind,
                target.versions,
                tuple(self._workloads[target.name].values()),
                self._hazards.get(target.name, ()),
                _joined(self._errors[target.name]),
            )
            for target in self.targets
            if target.name in begun
        ]
        return Report.now(figures, [model.name for model in self.models], complete, self._settings)

    def run(self, steps: Callable[[], None]) -> Report:
        """Call `steps` and return the report.

        KeyboardInterrupt and SystemExit end the steps and the targets' processes, and give the report so far.
        A target on which nothing ran to the end of the steps has an error.
        """
        try:
            steps()
        except (KeyboardInterrupt, SystemExit):
            for target in self.targets:
                target.close(QUICKLY)
            return self.report(complete=False)
        for name, figures in self._workloads.items():
            why = [each.verdicts[0].detail.removeprefix(NOT_RUN) for each in figures.values() if not each.ran]
            if why and len(why) == len(figures):
                self._errors[name].append(("nothing ran", why[0]))
        return self.report(complete=True)
