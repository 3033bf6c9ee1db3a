"""Targets that are Python classes: llama_cpp's, with and without its caches, ours, the user's."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError  # not yet the builtin one in Python 3.10
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from llamahybrid.children import ending, python
from llamahybrid.errors import TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.hazards.runner import loading
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.targets.base import SECONDS, ModelFile, Reply, Session, Shape, Target
from llamahybrid.harness.workloads.speech import Vocabulary


def library_environment(lib: Path | None, kind: str) -> dict[str, str]:
    """Return the environment of a process that loads the libllama in `lib` (a file, or its folder).

    None: the engine that llamahybrid chooses for ours, that of llama_cpp for the others. The user's folder of
    conversations is left out. Raises EngineError if there is no libllama.
    """
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    environment.pop("LLAMAHYBRID_DISK", None)
    if lib is None:
        return environment if kind == "ours" else {**environment, "LLAMAHYBRID_ENGINE": "stock"}
    return environment | loading(lib)


LAST_LINES = 4
"""Lines of a dead process's stderr that are shown: CUDA names its error three lines before the last."""


class Process:
    """A child process that answers calls."""

    def __init__(self, environment: dict[str, str], timeout: Callable[[], float] = lambda: SECONDS) -> None:
        """`timeout`: returns the seconds that a call may take."""
        self._timeout = timeout
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `close`
        self._folder = tempfile.TemporaryDirectory(prefix="llamahybrid-target-")
        self._process = subprocess.Popen(
            python("llamahybrid.harness.targets.child"),
            env={**environment, "TMPDIR": self._folder.name},  # removed after a crash, too
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        self._numbers, self._lock, self._writing = itertools.count(), threading.Lock(), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._over = False
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, do: str, **more: Any) -> Any:
        """Return the child's answer. Raises TargetError if it fails, dies or hangs."""
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            self._waiting[number] = answer
            over = self._over
        try:
            if over:
                raise EOFError
            assert self._process.stdin is not None
            with self._writing:  # not the reader's lock, which a full pipe would block
                self._process.stdin.write(json.dumps({"id": number, "do": do, **more}) + "\n")
                self._process.stdin.flush()
            seconds = self._timeout()
            return answer.result(seconds)
        except TimeoutError:
            self._process.kill()
            raise TargetError(f"no answer within {seconds:.0f} s") from None
        except (OSError, ValueError, EOFError):
            raise self._death() from None
        finally:
            with self._lock:
                del self._waiting[number]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
                with self._lock:
                    waiting = self._waiting[said["id"]]
            except (ValueError, TypeError, KeyError):
                continue  # printed by a sitecustomize, say; or nobody waits any more
            if "error" in said:
                waiting.set_exception(TargetError(said["error"]))
            else:
                waiting.set_result(said["reply"])
        with self._lock:
            self._over = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(EOFError())

    def _death(self) -> TargetError:
        try:
            how = ending(self._process.wait(20))
        except subprocess.TimeoutExpired:
            how = "no exit status yet"
        self._log.seek(0)
        lines = [line for line in self._log.read()[-4000:].splitlines() if line.strip()]
        return TargetError(f"its process died, {how}: {' | '.join(lines[-LAST_LINES:])}".rstrip(": "))

    def close(self, patience: float = 20.0) -> None:
        """End the process; kill it after `patience` seconds."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()


class _LocalSession(Session):
    """A class in a child process."""

    def __init__(self, process: Process, opened: dict[str, Any]) -> None:
        self._process = process
        self.pid = int(opened["pid"])
        self.parallel = int(opened["parallel"])
        self.takes_chats = bool(opened["template"])
        self.salts = bool(opened["salts"])
        self.vocabulary = Vocabulary.from_json(opened["vocabulary"])

    def ask(self, request: Request) -> Reply:
        data = self._process.call("ask", request=asdict(request))
        return Reply(**{**data, "prompt": tuple(data["prompt"]), "tokens": tuple(data["tokens"])})

    def sameness(self, request: Request, reply: Reply) -> tuple[Sameness, str]:
        same, detail = self._process.call("check", number=reply.extra["number"])
        return same, detail

    @cached_property
    def state_bytes(self) -> int | None:
        return int(self._process.call("state_bytes"))

    def keep_no_rows(self) -> None:
        self._process.call("keep_no_rows")

    def decoded(self) -> int | None:
        return int(self._process.call("decoded"))

    def spell(self, tokens: Sequence[int], special: bool = True) -> str | None:
        return str(self._process.call("spell", tokens=list(tokens), special=special))


class LocalTarget(Target):
    """`stock`, `stock+ram`, `stock+disk`, `ours`, `class:FILE:NAME`."""

    def __init__(self, name: str, kind: str, lib: Path | None = None) -> None:
        """Raises EngineError if there is no libllama in `lib`."""
        super().__init__(name, kind)
        self._environment = library_environment(lib, kind)
        self.library = ""
        """Path of the loaded libllama, once a session was open."""
        self._process: Process | None = None

    @contextmanager
    def open(self, model: ModelFile | None, shape: Shape) -> Iterator[Session]:
        """Open the model anew in this target's process. Raises TargetError."""
        if model is None:
            raise TargetError(f"{self.name} needs a model")
        process = self._process = self._process or Process(self._environment, self.timeout)
        try:
            options = {"n_threads": 1, "n_threads_batch": 1, **model.options}
            kind, path = self.kind, str(model.path)
            opened = process.call(
                "open", kind=kind, model=path, options=options, n_ctx=shape.n_ctx, parallel=shape.parallel
            )
            self.versions = self.versions or process.call("versions")
            self.library = self.library or process.call("library")
            yield _LocalSession(process, opened)
            if self.kind.startswith("class:"):  # the class or its module may keep state
                self.close()
        except BaseException as error:
            # the next workload starts in a new process
            self.close(20.0 if isinstance(error, Exception) else 1.0)
            raise

    def close(self, patience: float = 20.0) -> None:
        """End the process; kill it after `patience` seconds."""
        if self._process is not None:
            self._process.close(patience)
            self._process = None
