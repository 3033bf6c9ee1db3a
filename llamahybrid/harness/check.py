"""A whole check: each target, model by model, through directed probes and workloads, into one report."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from llamahybrid.errors import LlamaHybridError
from llamahybrid.files import distinct_names
from llamahybrid.harness import directed
from llamahybrid.harness.figures import workload_figures
from llamahybrid.harness.plan import Plan, measured, plan
from llamahybrid.harness.report import Report, TargetFigures, Verdict, WorkloadFigures
from llamahybrid.harness.runner import Played, Player, suits
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.workloads.agents import AGENTS
from llamahybrid.harness.workloads.chats import CHAT_WORKLOADS
from llamahybrid.harness.workloads.multi_user import CROWDS, four_users
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, long_prompt, thinking_stripped

PARALLEL_BOUND = 1.5
"""Oracle ratio of several clients at once: who comes first depends on threads."""

PARALLEL = (
    Workload("4 clients: thinking stripped", thinking_stripped, bound=PARALLEL_BOUND, clients=4),
    Workload("4 clients: four users each", four_users, bound=PARALLEL_BOUND, clients=4),
)

WORKLOADS: tuple[Workload, ...] = (
    *(w for w in TOKEN_WORKLOADS if w.start is not long_prompt),
    *CROWDS,
    *CHAT_WORKLOADS,
    *AGENTS,
    *PARALLEL,
)


@dataclass(frozen=True)
class Kind:
    """A kind of memory, and the tiny model that stands for it."""

    arch: str
    window: int | None = None
    chats: bool = False

    def make(self, folder: Path) -> ModelFile:
        """Write the model."""
        from llamahybrid import tiny

        path = tiny.make(self.arch, folder / f"{self.arch}.gguf", window=self.window)
        if self.window is None:
            return ModelFile(self.arch, path, chats=self.chats)
        # a windowed cache has room for the window and one batch, padded to 256: more are needed to lose any
        options = {"swa_full": False, "n_ubatch": 32}
        return ModelFile(self.arch, path, options, ("-ub", "32"), self.chats)


KINDS = (Kind("qwen35", chats=True), Kind("gemma3", 16), Kind("llama"))
"""Hybrid, sliding window, plain attention."""


@contextmanager
def models(
    given: Sequence[Path], gpu_layers: int = 0, make: bool = True, threads: int | None = None
) -> Iterator[list[ModelFile]]:
    """The models given, or tiny ones of each kind of memory; without `make` none.

    `threads` None: as many as there are cores for the models given, one for tiny models.
    Raises ValueError for one that is given twice.
    """
    if given or not make:
        n = threads or os.cpu_count() or 1
        layers = {"n_gpu_layers": gpu_layers} if gpu_layers else {}
        more = {"n_threads": n, "n_threads_batch": n, **layers}
        server = ["-t", str(n)]
        if gpu_layers:
            server += ["-ngl", "999" if gpu_layers < 0 else str(gpu_layers)]
        names = distinct_names(given)
        yield [ModelFile(name, path, more, server) for name, path in zip(names, given, strict=True)]
        return
    with tempfile.TemporaryDirectory(prefix="llamahybrid-check-") as folder:
        yield [kind.make(Path(folder)) for kind in KINDS]


Progress = Callable[[str, int, int], None]
"""Hears what runs, how many steps are done, and of how many."""

MEMORY_SHARE = 0.1
"""Of the time of a target, for the requests after which its memory is looked at."""
MEMORY_REQUESTS = directed.WARM + directed.ROUNDS * directed.COUNTED
FORGIVEN = 0.25
"""Answers are compared until this share of a target's time is over beside the whole of it."""


@dataclass
class TargetRun:
    """Figures of a target, as they come."""

    target: Target
    workloads: list[WorkloadFigures] = field(default_factory=list)
    hazards: tuple[Verdict, ...] = ()
    errors: list[str] = field(default_factory=list)

    def figures(self) -> TargetFigures:
        """Return what there is so far."""
        said = "; ".join(self.errors) or None
        name, kind, versions = self.target.name, self.target.kind, self.target.versions()
        return TargetFigures(name, kind, versions, tuple(self.workloads), self.hazards, said)


def report_of(runs: Iterable[TargetRun], models: Sequence[ModelFile], complete: bool) -> Report:
    """Return the report of targets that ran, made now."""
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    names = tuple(model.name for model in models)
    return Report(made, machine(), names, tuple(each.figures() for each in runs), complete)


@dataclass
class Check:
    """A run of directed probes and workloads on targets and models."""

    targets: Sequence[Target]
    models: Sequence[ModelFile]
    workloads: Sequence[Workload] = WORKLOADS
    """Where they are not all there are, one that does not suit a target is said not to have run."""
    hazards: Callable[[Target], tuple[Verdict, ...]] = field(default=lambda target: ())
    progress: Progress = field(default=lambda text, done, of: None)
    minutes: float | None = None
    """Time for all of it: workloads are shortened and left out so that it suffices. None: no limit."""
    found: Callable[[Report], None] = field(default=lambda report: None)
    """Hears the report so far after each step."""

    def run(self) -> Report:
        """Run all; a target that dies is reported, not raised.

        KeyboardInterrupt and SystemExit end the run: the report has what was found, and is not `complete`.
        """
        self._done: list[TargetRun] = []
        self._plans: dict[str, Plan] = {}
        self._steps = 0
        self._pairs_left = sum(len(self._models_of(target)) for target in self.targets)
        self._of = self._pairs_left * (len(directed.PROBES) + 1 + len(self.workloads))
        self._end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        try:
            for target in self.targets:
                self._target(target)
                target.close()
        except (KeyboardInterrupt, SystemExit):
            for target in self.targets:
                target.close(1.0)
            return self._report(complete=False)
        return self._report(complete=True)

    def _report(self, complete: bool) -> Report:
        return report_of(self._done, self.models, complete)

    def _models_of(self, target: Target) -> Sequence[ModelFile | None]:
        return self.models if target.needs_model else (None,)

    def _target(self, target: Target) -> None:
        found = TargetRun(target)
        self._done.append(found)
        given = self._models_of(target)
        for model in given:
            before = f"{model.name}: " if model is not None and len(given) > 1 else ""
            steps = self._steps
            try:
                for each in self._model(target, model):
                    found.workloads.append(named(each, before))
                    self.found(self._report(complete=False))
            except LlamaHybridError as error:
                found.errors.append(f"{before}{error}")
            self._pairs_left -= 1
            self._steps = steps + len(directed.PROBES) + 1 + len(self.workloads)
        try:
            found.hazards = self.hazards(target)
        except LlamaHybridError as error:
            found.errors.append(f"hazards: {error}")

    def _model(self, target: Target, model: ModelFile | None) -> Iterator[WorkloadFigures]:
        bad: set[str] = set()
        name = f"{target.name}, {model.name}" if model else target.name
        share = None if self._end is None else max(0.0, self._end - time.monotonic()) / self._pairs_left
        chosen = Plan() if share is None else self._plan(target, model, name, share)
        until = None if share is None else time.monotonic() + share
        late = None if share is None or until is None else until + FORGIVEN * share
        for probe in directed.PROBES:
            self._step(f"{name}: {probe.about}")
            if bad or until is None or time.monotonic() < until:
                with target.open(model, directed.SHAPE) as session:
                    done = directed.run(session, probe, bad, chosen.script_scale)
                bad |= {verdict.name for verdict in done.verdicts if verdict.outcome == "bad"}
                yield done
            else:
                yield left_out(f"probe: {probe.about}", LATE)
        self._step(f"{name}: memory")
        with target.open(model, directed.SHAPE) as session:
            requests = MEMORY_REQUESTS * chosen.slowest_request
            fits = 1.0 if share is None else MEMORY_SHARE * share / max(requests, 1e-6)
            yield directed.memory(session, min(1.0, fits))
        for workload in self.workloads:
            if workload.template and model is not None and not model.chats:
                continue
            self._step(f"{name}: {workload.name}")
            needs = chosen.seconds.get(workload.name, 0.0)
            if workload.name in chosen.left_out or (until is not None and time.monotonic() > until):
                why = f"{LATE}; it takes about {needs:.0f} s"
                yield left_out(workload.name, why, workload.bound)
                continue
            with target.open(model, Shape(workload.n_ctx, workload.clients)) as session:
                if not suits(session, workload):
                    if self.workloads is not WORKLOADS:
                        chats = workload.template
                        why = "there is no chat template" if chats else "the target takes no token ids"
                        yield left_out(workload.name, why, workload.bound)
                    continue
                yield self._played(session, workload, f"{name}: {workload.name}", chosen.scale, until, late)

    def _played(
        self,
        session: Session,
        workload: Workload,
        name: str,
        scale: float,
        until: float | None,
        late: float | None,
    ) -> WorkloadFigures:
        asked = 0

        def told(_: Played) -> None:
            nonlocal asked
            asked += 1
            self.progress(f"{name}, request {asked} done", self._steps - 1, self._of)

        session.decoded()
        player = Player(session, told, until)
        played = player.converse(workload, scale)
        decoded = session.decoded()
        self.progress(f"{name}, comparing answers", self._steps - 1, self._of)
        return workload_figures(
            session, workload, played, decoded, scale=scale, until=late, cut_short=player.cut_short
        )

    def _plan(self, target: Target, model: ModelFile | None, name: str, share: float) -> Plan:
        """The plan of a model, made by the first target that opens it. Raises TargetError."""
        key = target.name if model is None else model.name
        if key not in self._plans:
            self.progress(f"{name}: measuring the model's speed", self._steps, self._of)
            with target.open(model, directed.SHAPE) as session:
                speed, request = measured(session)
                suited = [each for each in self.workloads if suits(session, each)]
            self._plans[key] = plan(suited, speed, share * (1 - MEMORY_SHARE), request)
        return self._plans[key]

    def _step(self, text: str) -> None:
        self.progress(text, self._steps, self._of)
        self._steps += 1


LATE = "the time was over (see --minutes)"


def left_out(name: str, why: str, bound: float | None = None) -> WorkloadFigures:
    """Return the figures of a workload that was asked for and did not run."""
    found = Verdict("runs", "cannot tell", f"it did not run: {why}")
    return WorkloadFigures(name, (), None, None, None, bound, None, (found,))


def named(figures: WorkloadFigures, before: str) -> WorkloadFigures:
    """With the model's name before the workload's, where there are several."""
    name = before + figures.workload
    return replace(
        figures, workload=name, requests=tuple(replace(each, workload=name) for each in figures.requests)
    )


def machine() -> dict[str, str]:
    """What figures depend on."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }
