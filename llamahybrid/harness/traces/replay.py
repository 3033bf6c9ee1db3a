"""Plays a trace on targets, request by request in the order of asking, into a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llamahybrid.errors import LlamaHybridError, ReportError
from llamahybrid.files import distinct_names
from llamahybrid.harness import figures
from llamahybrid.harness.check import Progress, TargetRun, named, report_of
from llamahybrid.harness.report import Report, WorkloadFigures
from llamahybrid.harness.runner import Player
from llamahybrid.harness.targets.base import Ask, ModelFile, Session, Shape, Target
from llamahybrid.harness.traces.hashing import stand_in
from llamahybrid.harness.traces.trace import Trace, chats, read


def needed_context(trace: Trace) -> int:
    """Tokens that its longest request takes, rounded up; characters are counted where there are no ids."""
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
) -> Report:
    """Play each trace on each target, in sessions of their own.

    KeyboardInterrupt and SystemExit end it: the report has what was found, and is not `complete`.
    Raises ReportError for what is no trace, ValueError for one that is there twice, OSError; what a target
    does wrong is in the report.
    """
    traces = {name: read(path) for name, path in zip(distinct_names(paths), paths, strict=True)}
    for name, trace in traces.items():
        if not trace.entries:
            raise ReportError(f"{name}: no request is in it")
    steps = [
        (target, model, name)
        for target in targets
        for model in (models if target.needs_model else (None,))
        for name in traces
    ]
    found = {target.name: TargetRun(target) for target in targets}
    complete = True
    try:
        for number, (target, model, name) in enumerate(steps):
            before = f"{model.name}: " if model is not None and len(models) > 1 else ""
            run, title = found[target.name], f"{target.name}: {before}{name}"
            progress(title, number, len(steps))
            try:
                with target.open(model, Shape(n_ctx or needed_context(traces[name]))) as session:
                    run.workloads.append(named(played(session, name, traces[name]), before))
            except LlamaHybridError as error:
                run.errors.append(f"{before}{name}: {error}")
            if number + 1 == len(steps) or steps[number + 1][0] is not target:
                target.close()
    except (KeyboardInterrupt, SystemExit):
        complete = False
        for target in targets:
            target.close(1.0)
    return report_of(found.values(), models, complete)


def played(session: Session, name: str, trace: Trace) -> WorkloadFigures:
    """One trace in an open session. Raises TargetError."""
    player = Player(session)
    for chat, entry in zip(chats(trace.entries), trace.entries, strict=True):
        player.ask(suited(session, entry.ask, trace.hashed), chat)
    checked = figures.checks(session, player.played)
    found = figures.requests(session, name, player.played, checked)
    least, decoded = figures.totals(0, player.played, found, None)
    ratio = decoded / least if least and decoded is not None else None
    verdicts = (
        figures.exact_verdict(player.played, checked),
        figures.reports_verdict(player.played, found, checked),
        figures.prefix_verdict(player.played, found, checked),
    )
    return WorkloadFigures(name, found, least, decoded, ratio, None, None, verdicts)


def suited(session: Session, ask: Ask, hashed: bool) -> Ask:
    """A request as this session takes it: token ids where they are known and it does, else messages."""
    if hashed:
        ask = stand_in(ask, session.vocabulary.words if session.vocabulary else ())
    if ask.tokens and (session.takes_tokens or not ask.messages):
        return replace(ask, messages=(), tools=(), text="")
    return replace(ask, tokens=())
