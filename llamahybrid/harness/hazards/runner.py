"""Runs each probe in a process of its own, and reports the hazards of a libllama."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from llamahybrid import tiny
from llamahybrid.children import ending, python
from llamahybrid.engine import installed, sdist, series
from llamahybrid.engine.process import Progress
from llamahybrid.errors import EngineError
from llamahybrid.files import without_home
from llamahybrid.harness.hazards.case import Probe
from llamahybrid.harness.hazards.catalogue import PROBES
from llamahybrid.harness.hazards.effect import Behaviour, Effect
from llamahybrid.harness.report import HAZARD, Outcome, Report, TargetFigures, Verdict

_CHILD = python("llamahybrid.harness.hazards.child")
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Result:
    """The effect of a probe on a model."""

    probe: Probe
    model: str
    """The name of a tiny model: an architecture, and a window, as in known.txt."""
    effect: Effect

    def verdict(self, patches: frozenset[str] | None) -> Verdict:
        """Return the verdict "hazard:<probe>" on a library; `patches`: its own, see `Library`.

        The detail has the outcome in its first line, then the steps, the function of llama.cpp and the
        outcome with our patches. A hazard that the library's patches do not cure is "cannot tell", because
        that is their known limit.
        """
        probe, found = self.probe, self.effect
        here = probe.known.get(self.model)
        known, sound = here or probe.known[probe.model], found.behaviour.sound
        lacking = here and patches is not None and not patches.issuperset(here.patches)
        unknown = found.behaviour in (Behaviour.NOT_APPLICABLE, Behaviour.FAILED)
        unknown |= bool(lacking) and found.behaviour is known.stock
        outcome: Outcome = "cannot tell" if unknown else "ok" if sound else "bad"
        said = [f"{probe.title}: {found.behaviour.value}"]
        if found.detail:
            said.append(f"{self.model}: {found.detail}")
        if found.difference and not sound:
            said.append(f"logits off by {found.difference:.2g}")
        if known.patches and not sound:
            sets = series.sets(sdist.PIN.version)
            cure = max((sets[number] for number in known.patches), key=("reuse", "server", "hardening").index)
            said.append(f"cured by the set {cure} ({' '.join(known.patches)})")
        patched = f"With our patches: {known.patched.value}, {known.says}."
        detail = f"{'; '.join(said)}\n{probe.done} (llama.cpp: {probe.site}) {patched}"
        return Verdict(f"{HAZARD}{probe.id}", outcome, detail)


@dataclass(frozen=True)
class Library:
    """A libllama as a child process sees it."""

    path: str
    """The file that was loaded."""
    system: str
    """Its build, as it reports it."""
    environment: Mapping[str, str]
    """Environment variables under which a process loads it."""
    patches: frozenset[str] | None = None
    """Numbers of its patches; None: not built by `engine build`, or from a checkout."""


def loading(path: Path) -> dict[str, str]:
    """Return variables that make a process load the libllama at `path`, a file or its folder.

    Raises EngineError if there is none.
    """
    folder = (path if path.is_dir() else path.parent).resolve()
    if not path.exists() or installed.library(folder, "llama") is None:
        raise EngineError(f"no libllama at {path}: give its file, or the folder that holds it")
    return {"LLAMAHYBRID_ENGINE": "", "LLAMA_CPP_LIB_PATH": str(folder), "MTMD_CPP_LIB": str(folder)}


def library(path: Path | None = None) -> Library:
    """Return the libllama at `path`, a file or its folder; None: the library that llama_cpp loads.

    The library is loaded once in a process of its own as a test.

    Raises:
        EngineError: there is no library, or llama_cpp could not load it.
    """
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment |= loading(path)
    try:
        child = subprocess.run(
            _CHILD, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"the libllama at {path} hangs when it is loaded") from error
    if child.returncode:
        reason = _last_line(child.stderr) or ending(child.returncode)
        raise EngineError(f"the libllama at {path or 'its default place'} cannot be loaded: {reason}")
    about = json.loads(child.stdout.splitlines()[-1])
    engine = installed.owner(Path(about["path"]).parent)
    return Library(about["path"], about["system"], environment, engine.numbers or None if engine else None)


def supervise(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Effect:
    """Run a child whose last line is an effect; its death or a timeout are effects, too."""
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace")
    _running.add(child)
    try:
        said, log = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        log = child.communicate()[1]
        return Effect(Behaviour.DIED, f"hung: killed after {seconds:g} s{_quoted(log)}")
    finally:
        _running.discard(child)
    if child.returncode < 0:
        return Effect(Behaviour.DIED, f"{ending(child.returncode)}{_quoted(log)}")
    if child.returncode:
        return Effect(Behaviour.FAILED, _last_line(log) or ending(child.returncode))
    try:
        return Effect.from_json(json.loads(said.splitlines()[-1]))
    except (ValueError, KeyError, IndexError, TypeError):
        return Effect(Behaviour.FAILED, "the child ended without an effect")


def run_on(
    file: Path,
    probe: Probe,
    under_test: Library,
    *,
    gpu_layers: int = 0,
    rpc: str = "",
    seconds: float = 60.0,
) -> Effect:
    """Run a probe on a model file, in a process of its own."""
    command = (*_CHILD, probe.id, str(file), str(gpu_layers), *([rpc] if rpc else []))
    return supervise(command, under_test.environment, seconds)


def run(
    cases: Sequence[tuple[Probe, str]],
    under_test: Library,
    *,
    jobs: int = 2,
    done: Callable[[Result], Any] = lambda result: None,
    **options: Any,
) -> list[Result]:
    """Run probes on tiny models of these names, `jobs` at a time; return the results in the same order.

    `done` is called with each result as it comes; `options`: as of `run_on`.

    Raises:
        UnknownArchitecture: `tiny` cannot make a model.
    """
    with tempfile.TemporaryDirectory(prefix="llamahybrid-hazards-") as folder:
        files = {model: _make(model, Path(folder)) for model in dict.fromkeys(model for _, model in cases)}
        # a probe that dies leaves its files behind
        library_here = replace(under_test, environment={**under_test.environment, "TMPDIR": folder})
        ended = threading.Event()

        def run_one(case: tuple[Probe, str]) -> Result:
            probe, model = case
            result = Result(probe, model, run_on(files[model], probe, library_here, **options))
            if not ended.is_set():  # else this child was killed
                done(result)
            return result

        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                return list(pool.map(run_one, cases))
            except BaseException:  # Ctrl-C does not wait for a probe that hangs
                ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for child in tuple(_running):
                    child.kill()
                raise


@cache
def verdicts(path: str) -> tuple[Verdict, ...]:
    """Return the verdicts of all probes on the libllama at `path`. Raises EngineError."""
    under_test = library(Path(path) if path else None)
    results = run([(probe, probe.model) for probe in PROBES], under_test)
    return tuple(result.verdict(under_test.patches) for result in results)


def report(
    probes: Sequence[Probe],
    under_test: Library,
    progress: Progress = lambda text, done, of: None,
    arch: str | None = None,
    **options: Any,
) -> Report:
    """Run probes on a library, each on its default model or one of `arch`; `options`: as of `run`.

    Failed probes, and a lack of any that applies, are the library's error in the report. KeyboardInterrupt
    and SystemExit end the run: the report is not `complete`.

    Raises UnknownArchitecture if there is no tiny model of `arch`.
    """
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        progress(result.probe.id, len(results) - 1, len(probes))

    models = [
        f"{arch}{''.join(each.model.partition('-window')[1:])}" if arch else each.model for each in probes
    ]
    with suppress(KeyboardInterrupt, SystemExit):
        run([*zip(probes, models, strict=True)], under_test, done=add, **options)
    results.sort(key=lambda each: probes.index(each.probe))
    failed = [result.probe.id for result in results if result.effect.behaviour is Behaviour.FAILED]
    error = f"{len(failed)} probes failed: {', '.join(failed)}" if failed else None
    if results and all(result.effect.behaviour is Behaviour.NOT_APPLICABLE for result in results):
        error = "no hazard applies to this library and model: nothing is known"
    path = without_home(under_test.path)
    found = tuple(result.verdict(under_test.patches) for result in results)
    versions = {"library": path, "system": under_test.system}
    target = TargetFigures("libllama", "libllama", versions, hazards=found, error=error)
    complete, used = len(results) == len(probes), dict.fromkeys(result.model for result in results)
    return Report.now([target], used, complete, {"library": path})


def _make(model: str, folder: Path) -> Path:
    """Write a tiny model."""
    arch, _, window = model.partition("-window")
    return tiny.make(arch, folder / f"{model}.gguf", window=int(window) if window else None)


def _last_line(text: str) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _quoted(text: str) -> str:
    """The last line of a log, shortened and without the path that a build machine left in it."""
    line = _last_line(text)
    where, found, rest = line.partition(": ")
    line = f"{where.rpartition('/')[2]}{found}{rest}"
    return f": {line[:160]}" if line else ""
