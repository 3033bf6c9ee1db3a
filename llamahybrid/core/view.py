"""View: upstream's attributes of a `Llama`, for one request.

Upstream's sampler, criteria and chat handlers read and set `input_ids`, `n_tokens` and the rows of `scores`.
Each request has its own; a `Llama`'s attributes of these names lead to the current request's
(`client.stateful`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llamahybrid.prompt_cache.base import Logits, Tokens
from llamahybrid.prompt_cache.nodes import common_prefix


class View:
    """Upstream's attributes for one request, and the number of valid rows of logits."""

    def __init__(self) -> None:
        self.input_ids: npt.NDArray[np.intc] = np.zeros(0, dtype=np.intc)
        self.n_tokens = 0
        self.scores: npt.NDArray[np.single] = np.zeros((0, 0), dtype=np.single)
        self.sampler: Any = None
        self.requires_eval = True
        self.logits_all = False
        self.seed = 0
        self.always_rows = False
        """The logits of every token were asked for when the model was opened (`logits_all`)."""
        self.true_rows = 0
        """Rows of `scores` that belong to the live tokens."""
        self.salt = b""
        """Digest of the salt of its requests."""
        self.native = _no_tokens()
        """The tokens up to the last natively decoded one, whose ids are below zero and not in `input_ids`."""
        self.handoff = False
        """A chat handler decoded content natively, and generates from it next."""
        self.busy = False
        """In use by a request that is not over."""
        self.tail: Logits | None = None
        """Copied rows of logits of the last tokens that were evaluated, shape (k, n_vocab)."""
        self.tail_end = -1
        """Number of tokens up to the last of these rows."""
        self._n_ctx = 0
        self._n_vocab = 0

    def make(self, n_ctx: int, n_vocab: int, rows: int) -> None:
        """Give the arrays their true sizes, `rows` of logits where not all are kept.

        Upstream's are smaller than what the library takes: that pads n_ctx to a multiple of 256
        (llama_cpp/llama.py, Llama.__init__).
        """
        self._n_ctx, self._n_vocab = n_ctx, n_vocab
        self.input_ids = np.zeros(n_ctx, dtype=np.intc)
        if len(self.scores) < rows:
            self.scores = np.empty((rows, n_vocab), dtype=np.single)
        if self.logits_all:
            self._make_scores()

    def blank(self) -> View:
        """Return an empty view of the same sizes and settings."""
        made = View()
        made.seed, made.always_rows, made.logits_all = self.seed, self.always_rows, self.always_rows
        if not self.always_rows and len(self.scores) < self._n_ctx:
            made.scores = self.scores  # not read, since rows are not kept
        made.make(self._n_ctx, self._n_vocab, len(self.scores))
        return made

    def refit(self) -> None:
        """Give `input_ids` its size again, after upstream replaced it."""
        self.input_ids = np.resize(self.input_ids, self._n_ctx).astype(np.intc)

    # -- tokens ----------------------------------------------------------------------------------

    def ids(self) -> Tokens:
        """Return a copy of the ids, shape (n,); below zero for natively decoded content."""
        ids = np.array(self.input_ids[: self.n_tokens], dtype=np.int32)
        native = self.native[: len(ids)]
        np.copyto(ids[: len(native)], native, where=native < 0)
        return ids

    def with_native(self, prompt: Tokens) -> Tokens:
        """Return a prompt read from `input_ids`, with the ids of natively decoded content."""
        native = self.native
        begin = prompt[: len(native)]
        if len(begin) < len(native) or not bool(np.all((begin == native) | (native < 0))):
            return prompt
        return np.concatenate([native, prompt[len(native) :]])

    def note_native(self, tokens: Tokens) -> None:
        """Note the ids of natively decoded content among these tokens."""
        unknown = np.flatnonzero(tokens < 0)
        self.native = tokens[: unknown[-1] + 1].copy() if len(unknown) else _no_tokens()

    def mirror(self, ids: Tokens, start: int, tip_logits: bool) -> None:
        """Replace the tokens from `start` on by `ids`, of which opaque ones are not shown.

        `tip_logits`: the context has the logits of the last one.
        """
        end = start + len(ids)
        np.copyto(self.input_ids[start:end], ids, where=ids >= 0)
        if len(self.native) > start or bool((ids < 0).any()):
            before = self.ids()[:start]
            self.note_native(np.concatenate([before, ids]))
        self.n_tokens = end
        self.true_rows = min(self.true_rows, end)
        self.requires_eval = not tip_logits

    def append(self, token: int, n: int) -> None:
        """Append a decoded token behind n others."""
        self.input_ids[n] = token
        self.n_tokens = n + 1
        self.requires_eval = False

    def shorten(self, n: int) -> None:
        """Keep at most n tokens."""
        self.n_tokens = min(self.n_tokens, n)

    def reset(self) -> None:
        """Remove all tokens."""
        self.n_tokens = 0
        self.native = _no_tokens()
        self.requires_eval = True
        self.handoff = False

    def serve(self, salt: bytes) -> bool:
        """Give the view to requests of a salt; True where tokens of another salt were removed."""
        if self.salt == salt:
            return False
        self.reset()
        self.sampler = None
        self.true_rows = 0
        self.salt = salt
        return True

    # -- rows of logits --------------------------------------------------------------------------

    def keep_rows(self, rows: bool) -> None:
        """Keep the logits of every token from now on, or only where `always_rows`."""
        self.logits_all = self.always_rows or rows
        if rows:
            self._make_scores()

    def row(self, index: int) -> Logits | None:
        """Return the logits behind a token, counted from the last one, -1; None: they are not there."""
        if self.tail is not None and self.tail_end == self.n_tokens and -len(self.tail) <= index < 0:
            row: Logits = self.tail[index]
            return row
        kept = self.logits_all and 0 <= self.n_tokens + index < self.true_rows
        return self.scores[self.n_tokens + index] if kept and index < -1 else None

    def take_rows(self, start: int, rows: Logits) -> None:
        """Store the logits of [start, start + k): `rows`, shape (k, n_vocab)."""
        end = start + len(rows)
        self.scores[start:end] = rows
        if self.true_rows >= start:
            self.true_rows = end

    def take_rows_of(self, other: View, prompt: Tokens) -> None:
        """Take over another view's rows of logits for the beginning of a prompt, if rows are kept.

        Rows of a view in use are copied; else the views exchange their arrays.
        """
        if not (self.logits_all and other.true_rows and self.n_tokens == 0):
            return
        known = other.ids()[: other.true_rows]
        n = common_prefix(known, prompt)
        if other.busy or len(other.scores) < len(self.scores):
            self.scores[:n] = other.scores[:n]
        else:
            self.scores, other.scores = other.scores, self.scores
            other.true_rows = 0
        self.true_rows = n

    def _make_scores(self) -> None:
        if len(self.scores) < self._n_ctx:
            self.scores = np.zeros((self._n_ctx, self._n_vocab), dtype=np.single)

    def fork(self) -> View:
        """Return a copy with its own sampler; rows of logits are copied where kept."""
        made = self.blank()
        made.logits_all = self.logits_all
        if self.logits_all:
            made._make_scores()
            made.scores[: self.n_tokens] = self.scores[: self.n_tokens]
            made.true_rows = self.true_rows
        made.input_ids[: self.n_tokens] = self.input_ids[: self.n_tokens]
        made.n_tokens, made.native, made.salt = self.n_tokens, self.native, self.salt
        made.handoff, made.requires_eval = self.handoff, self.requires_eval
        made.tail, made.tail_end = self.tail, self.tail_end
        return made


def _no_tokens() -> Tokens:
    return np.zeros(0, dtype=np.int32)
