"""A whole run: every target through the probes and workloads, model by model, into one report."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from llamahybrid.errors import LlamaHybridError
from llamahybrid.files import distinct_names
from llamahybrid.harness import directed
from llamahybrid.harness.figures import workload_figures
from llamahybrid.harness.report import Report, TargetFigures, Verdict, WorkloadFigures
from llamahybrid.harness.runner import Player, suits
from llamahybrid.harness.targets.base import ModelFile, Shape, Target
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
def models(given: Sequence[Path], gpu_layers: int = 0, make: bool = True) -> Iterator[list[ModelFile]]:
    """The models given, or tiny ones of each kind of memory; without `make` none.

    Raises ValueError for one that is given twice.
    """
    if given or not make:
        more = {"n_gpu_layers": gpu_layers} if gpu_layers else {}
        server = ("-ngl", "999" if gpu_layers < 0 else str(gpu_layers)) if gpu_layers else ()
        names = distinct_names(given)
        yield [ModelFile(name, path, more, server) for name, path in zip(names, given, strict=True)]
        return
    with tempfile.TemporaryDirectory(prefix="llamahybrid-check-") as folder:
        yield [kind.make(Path(folder)) for kind in KINDS]


Progress = Callable[[str], None]


@dataclass
class Check:
    """What is to be run."""

    targets: Sequence[Target]
    models: Sequence[ModelFile]
    workloads: Sequence[Workload] = WORKLOADS
    """Where they are not all there are, one that does not suit a target is said not to have run."""
    hazards: Callable[[Target], tuple[Verdict, ...]] = field(default=lambda target: ())
    progress: Progress = field(default=lambda text: None)

    def run(self) -> Report:
        """All of it; a target that dies is reported, not raised."""
        done = []
        for target in self.targets:
            done.append(self._target(target))
            target.close()
        return Report(
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine=machine(),
            models=tuple(model.name for model in self.models),
            targets=tuple(done),
        )

    def _target(self, target: Target) -> TargetFigures:
        found: list[WorkloadFigures] = []
        errors: list[str] = []
        given: Sequence[ModelFile | None] = self.models if target.needs_model else (None,)
        for model in given:
            before = f"{model.name}: " if model is not None and len(given) > 1 else ""
            try:
                for each in self._model(target, model):
                    found.append(named(each, before))
            except LlamaHybridError as error:
                errors.append(f"{before}{error}")
        hazards: tuple[Verdict, ...] = ()
        try:
            hazards = self.hazards(target)
        except LlamaHybridError as error:
            errors.append(f"hazards: {error}")
        said = "; ".join(errors) or None
        return TargetFigures(target.name, target.kind, target.versions(), tuple(found), hazards, said)

    def _model(self, target: Target, model: ModelFile | None) -> Iterator[WorkloadFigures]:
        bad: set[str] = set()
        name = f"{target.name}, {model.name}" if model else target.name
        for probe in directed.PROBES:
            self.progress(f"{name}: {probe.about}")
            with target.open(model, directed.SHAPE) as session:
                done = directed.run(session, probe, bad)
            bad |= {verdict.name for verdict in done.verdicts if verdict.outcome == "bad"}
            yield done
        self.progress(f"{name}: memory")
        with target.open(model, directed.SHAPE) as session:
            yield directed.memory(session)
        for workload in self.workloads:
            if workload.template and model is not None and not model.chats:
                continue
            self.progress(f"{name}: {workload.name}")
            with target.open(model, Shape(workload.n_ctx, workload.clients)) as session:
                if not suits(session, workload):
                    if self.workloads is not WORKLOADS:
                        yield _left_out(workload)
                    continue
                session.decoded()
                played = Player(session).converse(workload)
                yield workload_figures(session, workload, played, session.decoded())


def _left_out(workload: Workload) -> WorkloadFigures:
    """One that was asked for and did not run."""
    why = "there is no chat template" if workload.template else "the target takes no token ids"
    verdict = Verdict("exact", "cannot tell", f"it did not run: {why}")
    return WorkloadFigures(workload.name, (), None, None, None, workload.bound, None, (verdict,))


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
