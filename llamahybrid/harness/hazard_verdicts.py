"""The hazards of a libllama as verdicts, and as a report of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from llamahybrid.engine.process import Progress
from llamahybrid.files import without_home
from llamahybrid.harness.hazards.case import Probe
from llamahybrid.harness.hazards.catalogue import PROBES
from llamahybrid.harness.hazards.effect import Behaviour
from llamahybrid.harness.hazards.runner import Library, Result, cure, expected, library, run
from llamahybrid.harness.report import Outcome, Report, TargetFigures, Verdict


@cache
def verdicts(path: str) -> tuple[Verdict, ...]:
    """Return the verdicts of all probes on the libllama at `path`. Raises EngineError."""
    under_test = library(Path(path) if path else None)
    return tuple(verdict(result, under_test.patches) for result in run(PROBES, under_test))


def verdict(result: Result, patches: frozenset[str] | None) -> Verdict:
    """Return a result as a verdict named "hazard:<probe>"; `patches`: those of the library.

    The detail has the outcome in its first line, then the steps, the function of llama.cpp and the outcome
    with our patches. A hazard that the library's patches do not cure is "cannot tell", because that is their
    known limit.
    """
    probe, found = result.probe, result.effect
    lacking = expected(result, patches)
    unknown = lacking or found.behaviour in (Behaviour.NOT_APPLICABLE, Behaviour.FAILED)
    outcome: Outcome = "cannot tell" if unknown else "ok" if found.behaviour.sound else "bad"
    said = [f"{probe.title}: {found.behaviour.value}"]
    if found.detail:
        said.append(f"{result.model}: {found.detail}")
    if found.difference and not found.behaviour.sound:
        said.append(f"logits off by {found.difference:.2g}")
    known = probe.known.get(result.model, probe.known[probe.model])
    if not found.behaviour.sound and known.patches:
        said.append(f"cured by the set {cure(known.patches)} ({' '.join(known.patches)})")
    sound = f"With our patches: {known.patched.value}, {known.says}."
    detail = f"{'; '.join(said)}\n{probe.done} (llama.cpp: {probe.site}) {sound}"
    return Verdict(f"hazard:{probe.id}", outcome, detail)


def report(
    probes: Sequence[Probe],
    under_test: Library,
    progress: Progress = lambda text, done, of: None,
    **settings: Any,
) -> Report:
    """Run probes on a library, with the settings of `run`.

    Failed probes, and a lack of any that applies, are the library's error in the report. KeyboardInterrupt
    and SystemExit end the run: the report is not `complete`.

    Raises UnknownArchitecture if there is no tiny model of `arch`.
    """
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        progress(result.probe.id, len(results) - 1, len(probes))

    with suppress(KeyboardInterrupt, SystemExit):
        run(probes, under_test, done=add, **settings)
    order = [probe.id for probe in probes]
    results.sort(key=lambda each: order.index(each.probe.id))
    failed = [result.probe.id for result in results if result.effect.behaviour is Behaviour.FAILED]
    error = f"{len(failed)} probes failed: {', '.join(failed)}" if failed else None
    if results and all(result.effect.behaviour is Behaviour.NOT_APPLICABLE for result in results):
        error = "no hazard applies to this library and model: nothing is known"
    path = without_home(under_test.path)
    found = tuple(verdict(result, under_test.patches) for result in results)
    versions = {"library": path, "system": under_test.system}
    models = dict.fromkeys(result.model for result in results)
    target = TargetFigures("libllama", "libllama", versions, hazards=found, error=error)
    return Report.now([target], models, len(results) == len(probes), {"library": path})
