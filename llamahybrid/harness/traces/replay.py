"""Plays a trace on targets, request by request in the recorded order, into a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llamahybrid.errors import ReportError
from llamahybrid.files import distinct_names
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.figures import judged, workload_figures
from llamahybrid.harness.plan import Plan
from llamahybrid.harness.report import WorkloadFigures, place
from llamahybrid.harness.runner import WorkloadRunner
from llamahybrid.harness.steps import Run, Say, Step
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.traces.trace import Entry, chats, read


def needed_context(trace: Sequence[Entry]) -> int:
    """Return the tokens of its longest request, rounded up; without token ids characters are counted."""
    longest = 0
    for entry in trace:
        ask = entry.ask
        size = len(ask.tokens) or entry.total or len(str(ask.messages)) + len(ask.text)
        longest = max(longest, size + ask.max_tokens)
    return max(1024, -(-longest // 256) * 256 + 256)


@dataclass
class Replay(Run):
    """Plays traces in sessions of their own."""

    paths: Sequence[Path]
    n_ctx: int | None = None
    """None: what each trace needs."""

    def parts(self) -> Sequence[Sequence[Step]]:
        """Read the traces. Raises ReportError, ValueError for a file that is given twice, OSError."""
        names = distinct_names(self.paths)
        traces = {name: read(path) for name, path in zip(names, self.paths, strict=True)}
        for name, trace in traces.items():
            if not trace:
                raise ReportError(f"{name}: no request is in it")
        return [[*self._steps(*pair, traces)] for pair in self.pairs()]

    def _steps(
        self, target: Target, model: ModelFile | None, traces: Mapping[str, list[Entry]]
    ) -> Iterator[Step]:
        on = f"{model.name}: " if model is not None and len(self.models) > 1 else ""
        for name, trace in traces.items():
            shape = Shape(self.n_ctx or needed_context(trace))
            yield Step(target, model, name, shape, partial(_replayed, name, trace), place=f"{on}{name}")


def _replayed(name: str, trace: Sequence[Entry], session: Session, plan: Plan, say: Say) -> WorkloadFigures:
    """Play a trace in an open session. Raises TargetError."""
    player = WorkloadRunner(session, lambda result: say(f"{name}, {place(result)}"))
    for chat, entry in zip(chats(trace), trace, strict=True):
        player.ask(replace(suited(session, entry.ask), chat=chat))
    return workload_figures(name, judged(session, name, player.played))


def suited(session: Session, ask: Request) -> Request:
    """Return a request in a form that the session takes: known token ids, else messages.

    Ids that a smaller vocabulary lacks become words of it, the same for the same id.
    """
    if ask.tokens and (session.takes_tokens or not ask.messages):
        tokens, known = ask.tokens, session.vocabulary
        if known is not None and known.words:
            largest = max(*known.words, *known.unspoken, 0)
            tokens = tuple(t if t <= largest else known.words[t % len(known.words)] for t in tokens)
        return replace(ask, tokens=tokens, messages=(), tools=(), text="")
    return replace(ask, tokens=())
