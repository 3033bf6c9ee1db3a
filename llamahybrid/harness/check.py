"""A check: each target, model by model, through directed probes and workloads, into one report."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llamahybrid.files import distinct_names
from llamahybrid.harness import directed
from llamahybrid.harness.plan import Plan, cost_of
from llamahybrid.harness.play import played
from llamahybrid.harness.report import Verdict, WorkloadFigures
from llamahybrid.harness.runner import unsuited
from llamahybrid.harness.steps import Run, Say, Step
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

FIRST = (
    "thinking stripped",
    "chat: thinking stripped",
    "agent loop",
    "edit a middle message",
    "4 clients: thinking stripped",
    "chat: tools and pages",
    "four users",
    "mid-generation",
)
"""Workloads that differ most; they come first, because a limited time may end before the others."""

WORKLOADS: tuple[Workload, ...] = tuple(
    sorted(
        (
            *(w for w in TOKEN_WORKLOADS if w.start is not long_prompt),
            *CROWDS,
            Workload("sub-agents", sub_agents),
            *CHAT_WORKLOADS,
            *CHAT_AGENTS,
            *PARALLEL,
        ),
        key=lambda each: FIRST.index(each.name) if each.name in FIRST else len(FIRST),
    )
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

    `threads` None: all idle cores for the models given, one for tiny models.
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


LOOK_SECONDS = 0.3
"""Time in which the busy cores are counted: a load average has the build that ended a minute ago."""


def idle_cores() -> int:
    """Return the cores that this process may use, less the share that is busy now; at least one.

    llama.cpp's threads wait for each other after each operation: one that gets no core delays all.
    """
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ticks = Path("/proc/stat")  # Linux alone
    try:
        before = ticks.read_text(encoding="ascii")
        time.sleep(LOOK_SECONDS)
        busy = busy_share(before, ticks.read_text(encoding="ascii"))
    except OSError:
        busy = 0.0
    return max(1, round(mine * (1 - busy)))


def busy_share(before: str, after: str) -> float:
    """Return the share of all cores' time that was not idle between two texts of /proc/stat (proc(5))."""
    first, then = ([int(each) for each in text.split("\n", 1)[0].split()[1:9]] for text in (before, after))
    spent = [late - early for early, late in zip(first, then, strict=True)]
    return 1 - sum(spent[3:5]) / max(1, sum(spent))  # user, nice, system, idle, iowait, ...


def model_file(name: str, path: Path, gpu_layers: int = 0, threads: int | None = None) -> ModelFile:
    """Return a model with its options for `Llama` and for llama-server; `threads` None: all idle cores."""
    n = threads or idle_cores()
    options, server = _offload(gpu_layers)
    threads_too = {"n_threads": n, "n_threads_batch": n, **options}
    return ModelFile(name, path, threads_too, ["-t", str(n), *server])


@dataclass
class Check(Run):
    """A run of directed probes and workloads on targets and models."""

    workloads: Sequence[Workload] = WORKLOADS
    """Unless these are `WORKLOADS`, one that does not suit a target is reported as not run."""
    hazards: Callable[[Target], tuple[Verdict, ...]] = lambda target: ()
    probes: bool = True
    """Run the directed probes and measure memory, too."""

    def parts(self) -> Sequence[Sequence[Step]]:
        """Return a part for each target on each model."""
        return [[*self._steps(*pair)] for pair in self.pairs()]

    def after(self, target: Target) -> tuple[Verdict, ...]:
        """Return `hazards` of a target."""
        return self.hazards(target)

    def settings(self) -> dict[str, str]:
        """Return the threads, unless they are of tiny models."""
        threads = {str(model.options["n_threads"]) for model in self.models if "n_threads" in model.options}
        return {"threads": ", ".join(threads)} if threads else {}

    def _steps(self, target: Target, model: ModelFile | None) -> Iterator[Step]:
        place = model.name if model and len(self.models) > 1 else ""
        step = partial(Step, target, model, place=place)
        bad: set[str] = set()
        for probe in directed.PROBES if self.probes else ():
            yield step(
                probe.workload.name,
                directed.SHAPE,
                partial(_probed, probe=probe, bad=bad),
                cost=probe.cost,
                always=probe is directed.PROBES[0],
                about=probe.about,
            )
        if self.probes:
            yield step(directed.MEMORY, directed.SHAPE, _memory, cost=directed.memory_cost, about="memory")
        for number, each in enumerate(self.workloads):
            if model is None or model.chats or not each.template:
                yield step(
                    each.name,
                    Shape(each.n_ctx, each.clients),
                    partial(played, workload=each, bad=bad),
                    cost=partial(cost_of, each),
                    unsuited=partial(self._unsuited, each),
                    always=not (self.probes or number),
                    bound=each.bound,
                )

    def _unsuited(self, workload: Workload, session: Session) -> str | None:
        why = unsuited(session, workload)
        return "" if why and self.workloads is WORKLOADS else why


def _probed(session: Session, plan: Plan, say: Say, probe: directed.Probe, bad: set[str]) -> WorkloadFigures:
    """Run a directed probe; `bad`: verdicts of earlier ones, to which those of this one are added."""
    done = directed.run(session, probe, bad, plan.scale, plan.compare_until)
    bad |= {verdict.name for verdict in done.verdicts if verdict.outcome == "bad"}
    return done


def _memory(session: Session, plan: Plan, say: Say) -> WorkloadFigures:
    return directed.memory(session, plan.scale)
