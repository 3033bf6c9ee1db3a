"""The requests of a chat, one at a time; a signal handler may cancel them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llamahybrid.cli.conversation import Message
from llamahybrid.client.handle import RequestHandle
from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.llama import Llama


@dataclass(frozen=True)
class Outcome:
    """The end of a request."""

    report: RequestReport | None = None
    """None: it failed before it began."""
    finish: str = ""
    """Upstream's `finish_reason`."""
    error: Exception | None = None


class ChatRequests:
    """Sends requests to a model: pieces of the answer first, then `outcome`."""

    def __init__(self, llm: Llama, on_progress: Callable[[PromptProgress], None]) -> None:
        """`on_progress`: receives the progress of prompts, in the decode loop's thread."""
        self.outcome = Outcome()
        self._llm = llm
        self._on_progress = on_progress
        self._handle: RequestHandle | None = None
        self._stopped = False

    def stop(self) -> None:
        """Cancel the running request, or the next one until `rearm`; safe in a signal handler."""
        self._stopped = True
        if (handle := self._handle) is not None:
            handle.cancel()

    def rearm(self) -> None:
        """End the effect of `stop` on later requests."""
        self._stopped = False

    def answer(self, messages: Sequence[Message], max_tokens: int) -> Iterator[str]:
        """The pieces of an answer."""
        finish = ""

        def stream() -> Iterator[str]:
            nonlocal finish
            chunks = self._llm.create_chat_completion(
                messages=list(messages), max_tokens=max_tokens, stream=True
            )
            for chunk in chunks:
                choice = chunk["choices"][0]
                finish = choice["finish_reason"] or finish
                yield choice["delta"].get("content") or ""

        yield from self._run(stream, lambda: finish)

    def prepare(self, messages: Sequence[Message]) -> None:
        """Decode the beginning of the next prompt."""

        def warm() -> Iterator[str]:
            self._llm.warm(list(messages))
            return iter(())

        for _ in self._run(warm, lambda: "stop"):
            pass

    def _run(self, request: Callable[[], Iterator[str]], finish: Callable[[], str]) -> Iterator[str]:
        error = None
        with self._llm.request(on_progress=self._on_progress) as handle:
            self._handle = handle
            if self._stopped:  # the signal came before the handle existed
                handle.cancel()
            try:
                yield from request()
            except Exception as raised:  # any failure: the chat continues
                error = raised
            finally:
                self._handle = None
            report = self._llm.last_request if handle.reports else None
        self.outcome = Outcome(report, finish(), error)
