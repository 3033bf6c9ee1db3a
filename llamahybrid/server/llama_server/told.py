"""Completions in llama-server's form (server-task.cpp, to_json_non_oaicompat)."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Sequence
from contextlib import closing

from llamahybrid.core.report import PromptProgress
from llamahybrid.llama import Llama
from llamahybrid.server.bodies import CompletionRequest
from llamahybrid.server.heard import Heard
from llamahybrid.server.job import Chunk, Create
from llamahybrid.server.llama_server.request import LlamaServerRequest
from llamahybrid.server.progress import Progress, numbers
from llamahybrid.server.usage import reports_so_far, timings, usage_so_far


class Telling:
    """Makes the answer to one request, in that request's thread."""

    def __init__(
        self, llm: Llama, asked: LlamaServerRequest, completion: CompletionRequest, alias: str
    ) -> None:
        """`completion`: the request as a completion, without a prompt if that depends on the model."""
        self._llm = llm
        self._asked = asked
        self._completion = completion
        self._alias = alias
        self._heard = Heard(asked.stops)
        self._text = ""

    def make(self, create: Create, stream: bool) -> Chunk | Generator[Chunk, None, None]:
        """Return the answer, or the events of a stream, of the chunks of `create`."""
        self._asked.prepare(self._llm, self._completion)
        with self._heard.listening():
            chunks = create(stream=True)
        told = self._events(chunks)
        if stream:
            return told
        *parts, last = told  # so that both end alike
        last["content"] = self._text
        last["tokens"] = [token for part in parts for token in part["tokens"]]
        return selected(last, self._asked.response_fields)

    def _events(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        reason: str | None = None
        began: float | None = None
        with closing(chunks):
            for chunk in chunks:
                began = time.perf_counter() if began is None else began
                (choice,) = chunk["choices"]
                reason = choice["finish_reason"] or reason
                if self._asked.n_predict == 0:
                    continue
                text, done = self._piece(choice["text"], time.perf_counter() - began)
                yield {**self._counts(), "content": text, "tokens": choice.get("tokens", []), "stop": False}
                if done:
                    reason = "length"
                    break
        stop = self._heard.stop_sequence(self._llm) if reason == "stop" else None
        yield {
            **self._counts(),
            **{"content": "", "tokens": [], "stop": True, "model": self._alias, "truncated": False},
            **{"has_new_line": "\n" in self._text, "stopping_word": stop or ""},
            "stop_type": "word" if stop else "eos" if reason == "stop" else "limit",
            "tokens_cached": usage_so_far(self._llm)["total_tokens"],
            "timings": timings(reports_so_far(self._llm)),
        }

    def _piece(self, text: str, seconds: float) -> tuple[str, bool]:
        """Return the part of a piece that belongs to the answer, and True if the answer ends there."""
        before, self._text = len(self._text), self._text + text
        late = 0 < self._asked.t_max_predict_ms < 1e3 * seconds and "\n" in text
        end = indented_end(self._text, self._asked.n_indent)
        if end is not None:
            self._text = self._text[: max(before, end)]
        return self._text[before:], end is not None or late

    def _counts(self) -> Chunk:
        used = usage_so_far(self._llm)
        return {
            **{"index": 0, "id_slot": -1, "tokens_evaluated": used["prompt_tokens"]},
            "tokens_predicted": used["completion_tokens"] if self._asked.n_predict else 0,
        }


class ContentProgress(Progress):
    """Progress of a prompt in the form of these chunks."""

    def chunk(self, progress: PromptProgress) -> Chunk:
        """See `Progress.chunk`."""
        nothing: Chunk = {"content": "", "tokens": [], "stop": False}
        return {"index": 0, "id_slot": -1, **nothing, "prompt_progress": numbers(progress)}

    def into(self, chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
        """Return the chunks as they are: they have no ids."""
        return chunks


def indented_end(text: str, indent: int) -> int | None:
    """Return the position of the first line, after the first one, with less indentation; None if none has."""
    for found in re.finditer(r"\n([ \t]*)(?=[^ \t])", text) if indent else ():
        if len(found[1]) < indent:
            return found.end()
    return None


def selected(told: Chunk, paths: Sequence[str]) -> Chunk:
    """Return the fields at these paths alone; all fields if no path is given."""
    if not paths:
        return told
    made: Chunk = {}
    for path in paths:
        found: object = told
        for name in path.split("/"):
            found = found[name] if isinstance(found, dict) and name in found else None
        if found is not None:
            made[path] = found
    return made
