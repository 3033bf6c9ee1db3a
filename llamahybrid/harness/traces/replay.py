"""Plays a trace on targets, request by request in the recorded order, into a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llamahybrid.engine.process import Progress
from llamahybrid.errors import LlamaHybridError, ReportError
from llamahybrid.files import distinct_names
from llamahybrid.harness.collecting import Collector
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.figures import judged, workload_figures
from llamahybrid.harness.report import Report, WorkloadFigures, place
from llamahybrid.harness.runner import RequestResult, Told, WorkloadRunner
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.traces.hashing import stand_in
from llamahybrid.harness.traces.trace import Trace, chats, read


def needed_context(trace: Trace) -> int:
    """Return the tokens of its longest request, rounded up; without token ids characters are counted."""
    longest = 0
    for entry in trace.entries:
        ask = entry.ask
        size = len(ask.tokens) or entry.total or len(str(ask.messages)) + len(ask.text)
        longest = max(longest, size + ask.max_tokens)
    return max(1024, -(-longest // 256) * 256 + 256)


def replay(
    paths: Sequence[Path],
    targets: Sequence[Target],
    models: Sequence[ModelFile],
    n_ctx: int | None = None,
    progress: Progress = lambda text, done, of: None,
    found: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Play each trace on each target, in sessions of their own; `found` is called after each.

    KeyboardInterrupt and SystemExit end the run: the report is not `complete`. Errors of targets are in the
    report. Raises ReportError for a file that is no trace, ValueError for one that is given twice, OSError.
    """
    traces = {name: read(path) for name, path in zip(distinct_names(paths), paths, strict=True)}
    for name, trace in traces.items():
        if not trace.entries:
            raise ReportError(f"{name}: no request is in it")
    results = Collector(targets, models, found)
    steps = [
        (target, model, name)
        for target in targets
        for model in (models if target.needs_model else (None,))
        for name in traces
    ]

    def play() -> bool:
        for number, (target, model, name) in enumerate(steps):
            on = f"{model.name}: " if model is not None and len(models) > 1 else ""
            title = f"{target.name}: {on}{name}"
            progress(title, number, len(steps))

            def told(result: RequestResult, title: str = title, done: int = number) -> None:
                progress(f"{title}, {place(result)}", done, len(steps))

            try:
                with target.open(model, Shape(n_ctx or needed_context(traces[name]))) as session:
                    results.put(target, played(session, name, traces[name], told), model)
            except LlamaHybridError as error:
                results.fail(target, f"{on}{name}: {error}")
            if number + 1 == len(steps) or steps[number + 1][0] is not target:
                target.close()
        return True

    return results.run(play)


def played(session: Session, name: str, trace: Trace, told: Told = lambda result: None) -> WorkloadFigures:
    """Play a trace in an open session; `told` is called with each request. Raises TargetError."""
    player = WorkloadRunner(session, told)
    for chat, entry in zip(chats(trace.entries), trace.entries, strict=True):
        player.ask(replace(suited(session, entry.ask, trace.hashed), chat=chat))
    return workload_figures(name, judged(session, name, player.played))


def suited(session: Session, ask: Request, hashed: bool) -> Request:
    """Return a request in a form that the session takes: known token ids, else messages."""
    if hashed:
        ask = stand_in(ask, session.vocabulary.words if session.vocabulary else ())
    if ask.tokens and (session.takes_tokens or not ask.messages):
        return replace(ask, messages=(), tools=(), text="")
    return replace(ask, tokens=())
