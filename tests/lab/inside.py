"""What campaigns set inside a model: here alone, so that they outlive how requests are run."""

from __future__ import annotations

import ctypes
from typing import Any


def set_patience(llm: Any, seconds: float) -> None:
    """A stream that nobody advances for so long makes room for others."""
    llm.requests.loop.admission.patience = seconds


def set_wait(llm: Any, wait: bool | float) -> None:
    """As the argument of that name; for a model that is open."""
    llm.requests.wait = wait


def waiting(llm: Any) -> int:
    """Requests that wait for a slot."""
    return len(llm.requests.loop.admission.waiting)


def keep_rows_on_request(llm: Any) -> None:
    """Only requests with logprobs keep rows of logits, as on a server."""
    llm.requests.logprobs_on_request = True


class MergedBatches:
    """How many native batches of a model, from now on, had tokens of several sequences, and of how many."""

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
