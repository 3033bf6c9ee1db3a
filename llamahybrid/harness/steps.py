"""A run: steps on targets and models, one after the other, within a time and into one report.

`check`, `bench` and `replay` make the steps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from llamahybrid.engine.process import Progress
from llamahybrid.errors import LlamaHybridError
from llamahybrid.harness.plan import LATE, MEASURING, Cost, Plan, Speed, fitting, measured
from llamahybrid.harness.report import NOT_RUN, Report, TargetFigures, Verdict, WorkloadFigures
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target

QUICKLY = 1.0
"""Seconds that processes have to end after Ctrl-C."""

MEASURED_WITH = Shape(512)

Say: TypeAlias = Callable[[str], None]
"""Shows what a step does."""


@dataclass(frozen=True)
class Step:
    """A workload, a directed probe or a trace on a target and a model."""

    target: Target
    model: ModelFile | None
    name: str
    """In the report."""
    shape: Shape
    play: Callable[[Session, Plan, Say], WorkloadFigures]
    """Run it in a fresh session. Raises TargetError."""
    cost: Callable[[float], Cost] = lambda scale: Cost()
    """The work at a scale."""
    unsuited: Callable[[Session], str | None] = lambda session: None
    """The reason why a session cannot run it; empty: it goes without saying."""
    place: str = ""
    """Of an error, which ends all steps of its target there."""
    always: bool = False
    """Run it whatever the time, so that the report has something of the target."""
    bound: float | None = None
    about: str = ""
    """Text for the progress; empty: the name."""

    @property
    def on(self) -> str:
        """The target and the model."""
        return f"{self.target.name}, {self.model.name}" if self.model else self.target.name


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


@dataclass
class Run(ABC):
    """A run and its report."""

    targets: Sequence[Target]
    models: Sequence[ModelFile]
    progress: Progress = field(default=lambda text, done, of: None, kw_only=True)
    found: Callable[[Report], None] = field(default=lambda report: None, kw_only=True)
    """Called with the report so far after each step."""
    minutes: float | None = field(default=None, kw_only=True)
    """Time for everything: workloads are shortened or left out to fit. None: no limit."""
    fresh: ClassVar[bool] = False
    """Each step has a process of its own."""

    def __post_init__(self) -> None:
        self._workloads: dict[str, dict[str, WorkloadFigures]] = defaultdict(dict)
        self._hazards: dict[str, tuple[Verdict, ...]] = {}
        self._errors: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._failed: set[tuple[str, str]] = set()
        self._speeds: dict[str, tuple[Speed, float]] = {}
        """Speed and scale of each model."""
        self._done = self._of = 0

    @abstractmethod
    def parts(self) -> Sequence[Sequence[Step]]:
        """Return all steps; each part has an equal share of the time that is left when it begins."""

    def settings(self) -> dict[str, str]:
        """Return the settings that figures depend on."""
        return {}

    def after(self, target: Target) -> tuple[Verdict, ...]:
        """Return the hazards of a target's library after its last step. Raises LlamaHybridError."""
        return ()

    def pairs(self) -> Iterator[tuple[Target, ModelFile | None]]:
        """Yield each target with each model, or with None if it needs none."""
        for target in self.targets:
            for model in self.models if target.needs_model else (None,):
                yield target, model

    def run(self) -> Report:
        """Run all steps and return the report; a target that dies is reported, not raised.

        KeyboardInterrupt and SystemExit end the steps and the targets' processes, and give the report so far.
        A target on which nothing ran to the end of the steps has an error.
        """
        try:
            self._run(self.parts())
        except (KeyboardInterrupt, SystemExit):
            for target in self.targets:
                target.close(QUICKLY)
            return self.report(complete=False)
        for name, figures in self._workloads.items():
            why = [each.verdicts[0].detail.removeprefix(NOT_RUN) for each in figures.values() if not each.ran]
            if why and len(why) == len(figures):
                self._errors[name].append(("nothing ran", why[0]))
        return self.report(complete=True)

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
        speeds = {
            f"speed of {name}": f"{speed.prefill:.3g} tokens/s, {speed.decode:.3g} of answers"
            for name, (speed, _) in self._speeds.items()
        }
        names = [model.name for model in self.models]
        return Report.now(figures, names, complete, {**self.settings(), **speeds})

    def _run(self, parts: Sequence[Sequence[Step]]) -> None:
        end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        last = {step.target: step for part in parts for step in part}
        self._of = sum(map(len, parts))
        for left, part in zip(range(len(parts), 0, -1), parts, strict=True):
            plan = Plan(None if end is None else max(0.0, end - time.monotonic()) / left)
            for step in part:
                target = step.target
                if (target.name, step.place) not in self._failed:
                    with self._errors_of(target, step.place):
                        self._take(step, part, plan)
                self._done += 1
                if last[target] is step:
                    with self._errors_of(target, "hazards"):
                        self._hazards[target.name] = self.after(target)
                if self.fresh or last[target] is step:
                    target.close()

    @contextmanager
    def _errors_of(self, target: Target, place: str) -> Iterator[None]:
        """Report an error in the body, with its place, as a reason why the target stopped there."""
        try:
            yield
        except LlamaHybridError as error:
            self._errors[target.name].append((place, str(error)))
            self._failed.add((target.name, place))

    def _take(self, step: Step, part: Sequence[Step], plan: Plan) -> None:
        """Run a step if there is time for it. Raises TargetError."""
        if plan.seconds is not None and plan.speed is None:
            self._measure(step, part, plan)
        cost, target = step.cost(plan.scale), step.target
        if (why := plan.begin(cost)) and not step.always:
            self._put(step, left_out(step.name, why, step.bound))
            return
        self._say(step, step.about or step.name)
        target.until = None if step.always else plan.gives_up
        began = time.monotonic()
        try:
            with target.open(step.model, step.shape) as session:
                opened = time.monotonic()
                plan.opening = opened - began
                if (unfit := step.unsuited(session)) is not None:
                    if unfit:
                        self._put(step, left_out(step.name, unfit, step.bound))
                    return
                self._put(step, step.play(session, plan, lambda text: self._say(step, text)))
                if plan.ask_until == plan.until:  # it was not cut short
                    plan.took(time.monotonic() - opened, cost)
        except LlamaHybridError as error:
            if target.until is None or time.monotonic() < target.until:
                raise
            self._put(step, left_out(step.name, f"{LATE}: {error}", step.bound))
        finally:
            target.until = None

    def _measure(self, step: Step, part: Sequence[Step], plan: Plan) -> None:
        """Set the speed and the scale of a plan; the first target of a model decides. Raises TargetError."""
        assert plan.seconds is not None, "there is a limit"
        name = step.model.name if step.model else step.target.name
        began = time.monotonic()
        if name not in self._speeds:
            self._say(step, "measuring the model's speed")
            step.target.until = plan.until
            try:
                with step.target.open(step.model, MEASURED_WITH) as session:
                    plan.opening = time.monotonic() - began
                    compared = any(each.cost(1.0).compared for each in part)
                    speed = measured(session, MEASURING * plan.seconds, compared)
                    suited = [each for each in part if each.unsuited(session) is None]
            finally:
                step.target.until = None
            if self.fresh:
                step.target.close()

            def needed(scale: float) -> float:
                work = sum(speed.seconds(each.cost(scale)) for each in suited)
                return work + plan.opening * len(suited)

            self._speeds[name] = speed, fitting(needed, plan.seconds - (time.monotonic() - began))
        plan.speed, plan.scale = self._speeds[name]

    def _put(self, step: Step, figures: WorkloadFigures) -> None:
        """Add a workload or replace it; with several models its name begins with the model's."""
        before = self._workloads[step.target.name]
        if step.model is not None and len(self.models) > 1:
            name = f"{step.model.name}: {figures.workload}"
            requests = tuple(replace(each, workload=name) for each in figures.requests)
            figures = replace(figures, workload=name, requests=requests)
        if figures.ran or figures.workload not in before:  # a later round that did not run takes nothing back
            before[figures.workload] = figures
        self.found(self.report(complete=False))

    def _say(self, step: Step, text: str) -> None:
        self.progress(f"{step.on}: {text}", self._done, self._of)
