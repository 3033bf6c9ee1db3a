"""The runner turns crashes and timeouts of its children into effects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from llamahybrid.engine.bindings import stock
from llamahybrid.errors import EngineError, UnknownArchitecture
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.hazards.catalogue import PROBES, find
from llamahybrid.harness.hazards.effect import Behaviour, Effect
from llamahybrid.harness.hazards.process import memory_left, peak_memory


def child(code: str, seconds: float = 120.0) -> Effect:
    """Run a child with `code`."""
    return runner.supervise([sys.executable, "-c", code], os.environ, seconds)


def test_crash_of_a_child_is_an_outcome() -> None:
    effect = child(
        "import os, sys; sys.stderr.write('a/b.cpp:7: last words\\n'); sys.stderr.flush(); os.abort()"
    )
    assert effect == Effect(Behaviour.DIED, "SIGABRT: b.cpp:7: last words")


def test_hanging_child_is_killed() -> None:
    effect = child("import time; time.sleep(600)", seconds=0.5)
    assert effect.behaviour is Behaviour.DIED
    assert effect.detail.startswith("hung")


@pytest.mark.parametrize("code", ["raise ValueError('no setup')", "pass", "print('{}')", "print('7')"])
def test_child_without_an_outcome_failed(code: str) -> None:
    assert child(code).behaviour is Behaviour.FAILED


def test_other_output_of_a_child_is_ignored() -> None:
    effect = Effect(Behaviour.WRONG, "said yes", 0.5)
    assert child(f"print('noise'); print({json.dumps(asdict(effect))!r})") == effect


def test_missing_or_malformed_library_is_a_typed_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "libllama.so"):
        with pytest.raises(EngineError, match="no libllama"):
            runner.library(path)
    (tmp_path / "libllama.so").write_bytes(b"not a library")
    with pytest.raises(EngineError, match="cannot be loaded"):
        runner.library(tmp_path / "libllama.so")


def test_unknown_architecture_is_a_typed_error() -> None:
    with pytest.raises(UnknownArchitecture):
        runner.report(PROBES[:1], runner.Library("", "", os.environ), arch="nonsense")


def test_results_come_in_the_order_of_the_probes_on_the_models_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []
    told: list[runner.Result] = []

    def make(model: str, folder: Path) -> Path:
        made.append(model)
        return tmp_path / model

    monkeypatch.setattr(runner, "_make", make)
    script = (
        "import json, sys; print(json.dumps({'behaviour': 'exact', 'detail': sys.argv[1:], 'difference': 0}))"
    )
    monkeypatch.setattr(runner, "_CHILD", (sys.executable, "-c", script))
    library = runner.Library("", "", os.environ)
    probes = [find("nan-after-removal"), find("nan-after-removal"), find("abort-at-once")]
    models = ["qwen35", "mamba", "qwen35"]
    found = runner.run([*zip(probes, models, strict=True)], library, gpu_layers=3, done=told.append)
    ids = [probe.id for probe in probes]
    assert [(each.probe.id, each.model) for each in found] == list(zip(ids, models, strict=True))
    assert [each.effect.detail for each in found] == [
        [name, str(tmp_path / model), "3"] for name, model in zip(ids, models, strict=True)
    ]
    assert made == ["qwen35", "mamba"], "each model is made once"
    assert sorted(each.probe.id for each in told) == sorted(ids)
    windowed = find("cut-behind-window")
    assert runner.report([probes[0], windowed], library, arch="jamba").models == ("jamba", "jamba-window16")


def test_interrupt_does_not_wait_for_a_hanging_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A child that says it runs has its files in the run's folder, and hangs; then Ctrl-C."""
    script = "import os, sys, tempfile, time; tempfile.mkdtemp(); time.sleep(100)"
    monkeypatch.setattr(runner, "_CHILD", (sys.executable, "-c", script))
    monkeypatch.setattr(runner, "_make", lambda model, folder: folder / model)
    folders: list[Path] = []
    started = subprocess.Popen

    def popen(*command: object, env: dict[str, str], **more: object) -> object:
        folders.append(Path(env["TMPDIR"]))
        child = started(*command, env=env, **more)  # type: ignore[call-overload]
        threading.Thread(target=interrupt, daemon=True).start()
        return child

    def interrupt() -> None:
        while not list(folders[0].iterdir()):
            time.sleep(0.01)
        if not stopped.is_set():
            stopped.set()
            signal.pthread_kill(main, signal.SIGINT)

    stopped, main = threading.Event(), threading.get_ident()
    monkeypatch.setattr(subprocess, "Popen", popen)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        cases = [(probe, probe.model) for probe in PROBES[:3]]
        with pytest.raises(KeyboardInterrupt):
            runner.run(cases, runner.Library("", "", os.environ), jobs=1, seconds=90)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(folders) == 1, "no other was started"
    assert not folders[0].exists(), "what it left is gone"
    assert not runner._running


COMMAND = (sys.executable, "-m", "llamahybrid.harness.hazards.child")


def last_line(*arguments: object, **environment: str) -> dict[str, object]:
    run = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def test_child_without_a_probe_describes_its_library(tmp_path: Path) -> None:
    libraries = stock()
    assert libraries is not None
    (tmp_path / "lib").symlink_to(libraries)
    said = last_line(LLAMAHYBRID_ENGINE="", LLAMA_CPP_LIB_PATH=str(tmp_path / "lib"))
    assert Path(str(said["path"])).parent == tmp_path / "lib"
    assert "CPU" in str(said["system"])


def test_probe_that_does_not_apply_is_no_failure(tiny_model: Callable[..., Path]) -> None:
    said = last_line("rollback-twice", tiny_model("jamba"), 0)
    assert said["behaviour"] == Behaviour.NOT_APPLICABLE.value
    assert "rollback planes" in str(said["detail"])


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
def test_memory_is_limited_within_the_block() -> None:
    with memory_left(64 << 20), pytest.raises(MemoryError):
        np.empty(1 << 30, np.uint8)
    assert np.empty(1 << 30, np.uint8).nbytes == 1 << 30


@pytest.mark.skipif(sys.platform == "win32", reason="peak memory is not known there")
def test_peak_memory_includes_freed_memory() -> None:
    np.ones(256 << 20, np.uint8)
    before = peak_memory()
    assert before >= 256 << 20
    assert peak_memory() >= before
