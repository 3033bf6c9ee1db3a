"""Access to the inside of a model for campaigns and tests, in this module alone."""

from __future__ import annotations

import ctypes
from typing import Any


def set_patience(llm: Any, seconds: float) -> None:
    """Set the seconds after which a stream that is not advanced makes room for others."""
    llm.slots.patience = seconds


def set_wait(llm: Any, wait: bool | float) -> None:
    """Set `wait` of a model that is open."""
    llm.requests.wait = wait


def waiting(llm: Any) -> int:
    """Requests that wait for a slot."""
    return len(llm.requests.loop.slots.waiting)


def posted(llm: Any) -> int:
    """Messages that the decode loop has not read yet."""
    return int(llm.requests.loop._inbox.qsize())


def keep_rows_on_request(llm: Any) -> None:
    """Only requests with logprobs keep rows of logits, as on a server."""
    llm.requests.logprobs_on_request = True


class MergedBatches:
    """Counts native batches of a model with tokens of several sequences, and these sequences."""

    def __init__(self, llm: Any) -> None:
        self.batches = 0
        self.rows = 0
        self._decode = llm._ctx.decode
        llm._ctx.decode = self

    def __call__(self, batch: Any) -> None:
        native = batch.batch
        if native.n_tokens > 1 and ctypes.cast(native.seq_id, ctypes.c_void_p).value is not None:
            sequences = {native.seq_id[i][0] for i in range(native.n_tokens)}
            self.batches += len(sequences) > 1
            self.rows += len(sequences) if len(sequences) > 1 else 0
        self._decode(batch)
