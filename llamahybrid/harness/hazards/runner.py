"""Runs each probe in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamahybrid import tiny
from llamahybrid.children import ending, python
from llamahybrid.engine import installed, sdist, series
from llamahybrid.errors import EngineError
from llamahybrid.harness.hazards.case import Probe
from llamahybrid.harness.hazards.effect import Behaviour, Effect

_CHILD = python("llamahybrid.harness.hazards.child")
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Result:
    """The effect of a probe on a model."""

    probe: Probe
    model: str
    """The name of a tiny model: an architecture, and a window, as in known.txt."""
    effect: Effect


def expected(result: Result, patches: frozenset[str] | None) -> bool:
    """Tell whether our engine was built without the patches for this and therefore behaves as stock."""
    known = result.probe.known.get(result.model)
    if known is None or patches is None or patches.issuperset(known.patches):
        return False
    return result.effect.behaviour is known.stock


def cure(patches: Sequence[str]) -> str:
    """Return the set of patches that has all of these; `stock`: it needs none."""
    known = series.sets(sdist.PIN.version)
    found = {known[number] for number in patches}
    return next((name for name in ("hardening", "server", "reuse") if name in found), "stock")


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
    probes: Iterable[Probe],
    under_test: Library,
    *,
    arch: str | None = None,
    known: bool = False,
    gpu_layers: int = 0,
    rpc: str = "",
    jobs: int = 2,
    seconds: float = 60.0,
    done: Callable[[Result], Any] = lambda result: None,
) -> list[Result]:
    """Run `probes` against a library, `jobs` at a time, each for `seconds` at most; results in their order.

    `arch` replaces the model that each probe names; with `known` it runs on every model that it knows
    (`Probe.known`), not on its first one only. `rpc`: RPC servers that layers go to. `done` is
    called with each result as it comes.

    Raises:
        UnknownArchitecture: `tiny` cannot make `arch`.
    """
    with tempfile.TemporaryDirectory(prefix="llamahybrid-hazards-") as folder:
        chosen = [
            (probe, _with_arch(model, arch) if arch else model)
            for probe in probes
            for model in (probe.known if known else (probe.model,))
        ]
        files = {model: _make(model, Path(folder)) for model in dict.fromkeys(model for _, model in chosen)}
        # a probe that dies leaves its files behind
        library_here = replace(under_test, environment={**under_test.environment, "TMPDIR": folder})

        ended = threading.Event()

        def run_one(pair: tuple[Probe, str]) -> Result:
            probe, model = pair
            options: dict[str, Any] = {"gpu_layers": gpu_layers, "rpc": rpc, "seconds": seconds}
            result = Result(probe, model, run_on(files[model], probe, library_here, **options))
            if not ended.is_set():  # else this child was killed
                done(result)
            return result

        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                return list(pool.map(run_one, chosen))
            except BaseException:  # Ctrl-C does not wait for a probe that hangs
                ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for child in tuple(_running):
                    child.kill()
                raise


def _with_arch(model: str, arch: str) -> str:
    """Return the name of a model of another architecture, with the same window."""
    _, mark, window = model.partition("-window")
    return f"{arch}{mark}{window}"


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
