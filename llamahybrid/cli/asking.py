"""One request of the chat at a time, in a thread: so Ctrl-C is heard while native code decodes a batch."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from llamahybrid.cli.conversation import Message
from llamahybrid.client.handle import RequestHandle
from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.llama import Llama


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    report: RequestReport | None = None
    """None where it did not come to be one."""
    finish: str = ""
    """Upstream's `finish_reason`."""
    error: Exception | None = None


class Asking:
    """What a model is asked: the pieces of the answer as they come, then `outcome`."""

    def __init__(self, llm: Llama) -> None:
        self.outcome = Outcome()
        self.on_progress: Callable[[PromptProgress], None] = lambda _: None
        """Told of the progress of prompts, in the thread that asks."""
        self._llm = llm
        self._worker = ThreadPoolExecutor(1, "chat")  # one for all: OpenMP keeps a team for each thread
        self._handle: RequestHandle | None = None
        self._stopped = False

    def close(self) -> None:
        """End what runs, and the thread."""
        self.stop()
        self._worker.shutdown()

    def stop(self) -> None:
        """End the request that runs, or the next one until `rearm`; takes no lock: a signal handler may."""
        self._stopped = True
        if (handle := self._handle) is not None:
            handle.cancel()

    def rearm(self) -> None:
        """What was stopped before is over: the next request runs."""
        self._stopped = False

    def answer(self, messages: Sequence[Message], max_tokens: int) -> Iterator[str]:
        """The pieces of an answer."""

        def ask(put: Callable[[str], None]) -> str:
            finish = ""
            stream: Iterator[Any] = self._llm.create_chat_completion(
                messages=list(messages), max_tokens=max_tokens, stream=True
            )
            for chunk in stream:
                choice = chunk["choices"][0]
                finish = choice["finish_reason"] or finish
                put(choice["delta"].get("content") or "")
            return finish

        return self._run(ask)

    def prepare(self, messages: Sequence[Message]) -> None:
        """Decode what the next prompt will begin with."""

        def ask(_: Callable[[str], None]) -> str:
            self._llm.warm(list(messages))
            return "stop"

        for _ in self._run(ask):
            pass

    def _run(self, ask: Callable[[Callable[[str], None]], str]) -> Iterator[str]:
        pieces: queue.SimpleQueue[str | PromptProgress | None] = queue.SimpleQueue()

        def work() -> Outcome:
            finish, error = "", None
            try:
                with self._llm.request(on_progress=pieces.put) as handle:
                    self._handle = handle
                    if self._stopped:  # before there was something to cancel
                        handle.cancel()
                    try:
                        finish = ask(pieces.put)
                    except Exception as raised:  # whatever it is, the chat goes on
                        error = raised
                    report = self._llm.last_request if handle.reports else None
                return Outcome(report, finish, error)
            finally:
                self._handle = None
                pieces.put(None)

        done = self._worker.submit(work)
        while (piece := pieces.get()) is not None:
            if isinstance(piece, PromptProgress):
                self.on_progress(piece)
            else:
                yield piece
        self.outcome = done.result()
