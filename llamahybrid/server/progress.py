"""Progress of a prompt in the stream of its answer, as llama-server reports it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import Any
from uuid import uuid4

from llamahybrid.core.report import PromptProgress


def numbers(progress: PromptProgress) -> dict[str, float]:
    """Return llama-server's numbers (tools/server/server-task.cpp, result_prompt_progress::to_json)."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(1e3 * progress.seconds, 3),
    }


class Progress:
    """Makes the progress chunks of one stream."""

    def __init__(self, chat: bool, model: str) -> None:
        """`model`: the model's name in the stream."""
        self._named: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4()}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        said: dict[str, Any] = {"delta": {"role": "assistant", "content": None}} if chat else {"text": ""}
        self._choice = {"index": 0, **said, "logprobs": None, "finish_reason": None}

    def chunk(self, progress: PromptProgress) -> dict[str, Any]:
        """Return a chunk with the progress alone."""
        return {**self._named, "choices": [dict(self._choice)], "prompt_progress": numbers(progress)}

    def into(self, chunks: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Return the chunks of the answer with the id of the progress chunks."""
        same = {name: self._named[name] for name in ("id", "created")}
        with closing(chunks):
            for chunk in chunks:
                yield {**chunk, **same}
