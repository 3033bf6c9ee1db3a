"""Completions in llama-server's form (server-task.cpp, to_json_non_oaicompat)."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import closing

from llamahybrid.core.report import PromptProgress
from llamahybrid.server.answer_format import EventFormat, Events
from llamahybrid.server.job import Chunk, Create
from llamahybrid.server.usage import prompt_progress, reports_so_far, timings, usage_so_far


class CompletionFormat(EventFormat):
    """The completion that answers one request."""

    end = b""

    _text = ""

    def progress(self, progress: PromptProgress) -> Chunk:
        """See `AnswerFormat.progress`."""
        nothing: Chunk = {"content": "", "tokens": [], "stop": False}
        return {"index": 0, "id_slot": -1, **nothing, "prompt_progress": prompt_progress(progress)}

    def make(self, create: Create, stream: bool) -> Chunk | Events:
        """See `AnswerFormat.make`; a whole answer is that of a stream, so that both end alike."""
        events = self.events(create(stream=True))
        return events if stream else self.whole(list(events))

    def whole(self, events: list[Chunk]) -> Chunk:
        """See `EventFormat.whole`."""
        *parts, last = events
        last["content"] = self._text
        last["tokens"] = [token for part in parts for token in part["tokens"]]
        return selected(last, self.asked.response_fields)

    def events(self, chunks: Events) -> Events:
        """See `EventFormat.events`: those of the chunks of a completion."""
        reason: str | None = None
        began: float | None = None
        with closing(chunks):
            for chunk in chunks:
                began = time.perf_counter() if began is None else began
                (choice,) = chunk["choices"]
                reason = choice["finish_reason"] or reason
                if self.asked.n_predict == 0:
                    continue
                text, done = self._piece(choice["text"], time.perf_counter() - began)
                yield {**self._counts(), "content": text, "tokens": choice.get("tokens", []), "stop": False}
                if done:
                    reason = "length"
                    break
        stop = self.stop_sequence() if reason == "stop" else None
        yield {
            **self._counts(),
            **{"content": "", "tokens": [], "stop": True, "model": self.alias, "truncated": False},
            **{"has_new_line": "\n" in self._text, "stopping_word": stop or ""},
            "stop_type": "word" if stop else "eos" if reason == "stop" else "limit",
            "tokens_cached": usage_so_far(self.llm)["total_tokens"],
            "timings": timings(reports_so_far(self.llm)),
        }

    def _piece(self, text: str, seconds: float) -> tuple[str, bool]:
        """Return the part of a piece that belongs to the answer, and True if the answer ends there."""
        before, self._text = len(self._text), self._text + text
        late = 0 < self.asked.t_max_predict_ms < 1e3 * seconds and "\n" in text
        end = indented_end(self._text, self.asked.n_indent)
        if end is not None:
            self._text = self._text[: max(before, end)]
        return self._text[before:], end is not None or late

    def _counts(self) -> Chunk:
        used = usage_so_far(self.llm)
        return {
            **{"index": 0, "id_slot": -1, "tokens_evaluated": used["prompt_tokens"]},
            "tokens_predicted": used["completion_tokens"] if self.asked.n_predict else 0,
        }


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
