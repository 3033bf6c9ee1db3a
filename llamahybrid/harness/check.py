"""A check: each target, model by model, through directed probes and workloads, into one report."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid.engine.process import Progress
from llamahybrid.files import distinct_names
from llamahybrid.harness import directed
from llamahybrid.harness.collecting import LATE, Collector, left_out
from llamahybrid.harness.figures import judged, workload_figures
from llamahybrid.harness.plan import Cost, Plan, Speed, longest_scale, measured
from llamahybrid.harness.report import Report, Verdict, WorkloadFigures
from llamahybrid.harness.runner import RequestResult, WorkloadRunner, unsuited
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.workloads.chats import CHAT_AGENTS, CHAT_WORKLOADS
from llamahybrid.harness.workloads.multi_user import CROWDS, four_users, sub_agents
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, long_prompt, thinking_stripped

PARALLEL_BOUND = 1.5
"""Oracle ratio of several clients at once, whose order depends on threads."""

PARALLEL = (
    Workload("4 clients: thinking stripped", thinking_stripped, bound=PARALLEL_BOUND, clients=4),
    Workload("4 clients: four users each", four_users, bound=PARALLEL_BOUND, clients=4),
)

WORKLOADS: tuple[Workload, ...] = (
    *(w for w in TOKEN_WORKLOADS if w.start is not long_prompt),
    *CROWDS,
    Workload("sub-agents", sub_agents),
    *CHAT_WORKLOADS,
    *CHAT_AGENTS,
    *PARALLEL,
)


def workloads_called(names: Sequence[str]) -> tuple[Workload, ...]:
    """Return the workloads of these names, all without names. Raises ValueError for an unknown one."""
    known = {each.name: each for each in WORKLOADS}
    if unknown := [name for name in names if name not in known]:
        every = ", ".join(map(repr, known))
        raise ValueError(f"no workload called {', '.join(map(repr, unknown))}; there are: {every}")
    return tuple(known[name] for name in names) if names else WORKLOADS


@contextmanager
def models(
    given: Sequence[Path], gpu_layers: int = 0, make: bool = True, threads: int | None = None
) -> Iterator[list[ModelFile]]:
    """The models given, or tiny ones of each kind of memory; without `make` none.

    `threads` None: all cores for the models given, one for tiny models.
    Raises ValueError for a model that is given twice.
    """
    if given or not make:
        yield [
            model_file(name, path, gpu_layers, threads)
            for name, path in zip(distinct_names(given), given, strict=True)
        ]
        return
    with tempfile.TemporaryDirectory(prefix="llamahybrid-check-") as folder:
        yield _tiny_models(Path(folder), gpu_layers)


def _tiny_models(folder: Path, gpu_layers: int) -> list[ModelFile]:
    """Write a model with a hybrid memory, one with a sliding window, and one with plain attention."""
    from llamahybrid import tiny

    def made(arch: str, window: int | None = None) -> Path:
        return tiny.make(arch, folder / f"{arch}.gguf", window=window)

    # a windowed cache has room for the window and one batch, padded to 256: more are needed to lose any
    small = {"swa_full": False, "n_ubatch": 32}
    options, server = _offload(gpu_layers)
    return [
        ModelFile("qwen35", made("qwen35"), options, server),
        ModelFile("gemma3", made("gemma3", 16), {**options, **small}, [*server, "-ub", "32"], chats=False),
        ModelFile("llama", made("llama"), options, server, chats=False),
    ]


def _offload(layers: int) -> tuple[dict[str, Any], list[str]]:
    """Options for `Llama` and for llama-server that put layers on a GPU; -1: all."""
    if not layers:
        return {}, []
    return {"n_gpu_layers": layers}, ["-ngl", "999" if layers < 0 else str(layers)]


def model_file(name: str, path: Path, gpu_layers: int = 0, threads: int | None = None) -> ModelFile:
    """Return a model with its options for `Llama` and for llama-server; `threads` None: all cores."""
    n = threads or os.cpu_count() or 1
    options, server = _offload(gpu_layers)
    threads_too = {"n_threads": n, "n_threads_batch": n, **options}
    return ModelFile(name, path, threads_too, ["-t", str(n), *server])


MEMORY_SHARE = 0.1
"""Of a target's time, for the requests between which its memory is measured."""
_MEMORY_REQUESTS = directed.WARM + directed.ROUNDS * directed.COUNTED
MEMORY_COST = Cost(directed.MEMORY_PROMPT * _MEMORY_REQUESTS, 2 * _MEMORY_REQUESTS)
"""Of all these requests where nothing is reused."""
COMPARING = 0.25
"""Extra time, as a share of a target's time, in which answers are still compared."""


@dataclass
class Check:
    """A run of directed probes and workloads on targets and models."""

    targets: Sequence[Target]
    models: Sequence[ModelFile]
    workloads: Sequence[Workload] = WORKLOADS
    """Unless these are `WORKLOADS`, one that does not suit a target is reported as not run."""
    hazards: Callable[[Target], tuple[Verdict, ...]] = field(default=lambda target: ())
    progress: Progress = field(default=lambda text, done, of: None)
    minutes: float | None = None
    """Time for everything: workloads are shortened or left out to fit. None: no limit."""
    found: Callable[[Report], None] = field(default=lambda report: None)
    """Called with the report so far after each step."""
    probes: bool = True
    """Run the directed probes and measure memory, too."""

    def run(self) -> Report:
        """Run everything; a target that dies is reported, not raised.

        KeyboardInterrupt and SystemExit end the run: the report is not `complete`.
        """
        self._scales: dict[str, tuple[Speed, float]] = {}
        self._results = Collector(self.targets, self.models, self.found)
        self._steps = 0
        pairs = [model for target in self.targets for model in self._models_of(target)]
        self._pairs_left, self._of = len(pairs), sum(map(self._steps_on, pairs))
        self._end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        return self._results.run(self._targets)

    def _targets(self) -> None:
        for target in self.targets:
            for model in self._models_of(target):
                self._on_model(target, model)
            with self._results.errors(target, "hazards"):
                self._results.put_hazards(target, self.hazards(target))
            target.close()

    def _models_of(self, target: Target) -> Sequence[ModelFile | None]:
        return self.models if target.needs_model else (None,)

    def _workloads_on(self, model: ModelFile | None) -> list[Workload]:
        return [each for each in self.workloads if model is None or model.chats or not each.template]

    def _steps_on(self, model: ModelFile | None) -> int:
        return self.probes * (len(directed.PROBES) + 1) + len(self._workloads_on(model))

    def _on_model(self, target: Target, model: ModelFile | None) -> None:
        """Run everything on one model; an error is reported and ends it."""
        steps = self._steps
        with self._results.errors(target, model.name if model and len(self.models) > 1 else ""):
            for figures in self._figures(target, model):
                self._results.put(target, figures, model)
        self._pairs_left -= 1
        self._steps = steps + self._steps_on(model)

    def _figures(self, target: Target, model: ModelFile | None) -> Iterator[WorkloadFigures]:
        name = f"{target.name}, {model.name}" if model else target.name
        plan = self._plan(target, model, name)
        if self.probes:
            yield from self._probes(target, model, name, plan)
        for workload in self._workloads_on(model):
            if not plan.fits(workload):
                self._steps += 1
                needed = f"it needs about {plan.seconds(workload):.0f} s, more than is left (see --minutes)"
                yield left_out(workload.name, LATE if plan.over else needed, workload.bound)
                continue
            self._step(f"{name}: {workload.name}")
            with target.open(model, Shape(workload.n_ctx, workload.clients)) as session:
                why_not = unsuited(session, workload)
                if why_not is None:
                    yield self._played(session, workload, f"{name}: {workload.name}", plan)
                elif self.workloads is not WORKLOADS:
                    yield left_out(workload.name, why_not, workload.bound)

    def _probes(
        self, target: Target, model: ModelFile | None, name: str, plan: Plan
    ) -> Iterator[WorkloadFigures]:
        bad: set[str] = set()
        for probe in directed.PROBES:
            if plan.over and not bad:
                self._steps += 1
                yield left_out(probe.workload.name, LATE)
                continue
            self._step(f"{name}: {probe.about}")
            with target.open(model, directed.SHAPE) as session:
                done = directed.run(session, probe, bad, plan.script_scale)
            bad |= {verdict.name for verdict in done.verdicts if verdict.outcome == "bad"}
            yield done
        if plan.over:
            self._steps += 1
            yield left_out(directed.MEMORY, LATE)
            return
        self._step(f"{name}: memory")
        share = 1.0
        if plan.speed is not None and plan.memory_seconds is not None:
            share = min(1.0, plan.memory_seconds / plan.speed.seconds(MEMORY_COST))
        with target.open(model, directed.SHAPE) as session:
            yield directed.memory(session, share)

    def _played(self, session: Session, workload: Workload, name: str, plan: Plan) -> WorkloadFigures:
        asked = 0

        def told(_: RequestResult) -> None:
            nonlocal asked
            asked += 1
            self.progress(f"{name}, request {asked} done", self._steps - 1, self._of)

        session.decoded()
        player = WorkloadRunner(session, told, plan.until)
        played = player.converse(workload, plan.scale)
        decoded = session.decoded()
        self.progress(f"{name}, comparing answers", self._steps - 1, self._of)
        if not played:  # the model was opened too late
            return left_out(workload.name, LATE, workload.bound)
        found = judged(session, workload.name, played, until=plan.compare_until)
        return workload_figures(
            workload.name,
            found,
            decoded,
            measured_from=workload.measured_from,
            bound=workload.bound,
            scale=plan.scale,
            cut_short=player.cut_short,
        )

    def _plan(self, target: Target, model: ModelFile | None, name: str) -> Plan:
        """Return the plan of a target on a model; the first target decides the scale. Raises TargetError."""
        if self._end is None:
            return Plan()
        share = max(0.0, self._end - time.monotonic()) / self._pairs_left
        until = time.monotonic() + share
        key = target.name if model is None else model.name
        if key not in self._scales:
            self.progress(f"{name}: measuring the model's speed", self._steps, self._of)
            with target.open(model, directed.SHAPE) as session:
                speed = measured(session)
                suited = [each for each in self.workloads if unsuited(session, each) is None]
            self._scales[key] = speed, longest_scale(suited, speed, share * (1 - MEMORY_SHARE))
        speed, scale = self._scales[key]
        return Plan(scale, speed, until, until + COMPARING * share, MEMORY_SHARE * share)

    def _step(self, text: str) -> None:
        self.progress(text, self._steps, self._of)
        self._steps += 1
