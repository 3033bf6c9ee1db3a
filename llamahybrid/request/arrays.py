"""UpstreamArrays: what `llama_cpp.Llama` itself says of its sequence, kept true as context memory changes.

Upstream's sampler, criteria and chat handlers read `input_ids`, `n_tokens` and the rows of `scores`; some
set them. Nothing else here writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as native

from llamahybrid.prompt_cache.base import Tokens

if TYPE_CHECKING:
    from llamahybrid.llama import Llama


@dataclass(frozen=True)
class SetAside:
    """Upstream's attributes of a request, while another one has its place."""

    ids: Tokens
    sampler: Any
    mirostat: Any
    requires_eval: bool
    rows: npt.NDArray[np.single] | None
    """Logits of the tokens, shape (n, n_vocab), where they are kept."""
    true_rows: int


class UpstreamArrays:
    """The arrays of one `Llama`, and which of their rows are true."""

    def __init__(self, llm: Llama) -> None:
        self._of = ref(llm)  # no cycle: a model is freed when nobody uses it any more
        self.always_rows = False
        """The logits of every token were asked for when the model was opened (`logits_all`)."""
        self.true_rows = 0
        """Rows of `scores` that are those of the live tokens."""

    @property
    def _llm(self) -> Llama:
        llm = self._of()
        assert llm is not None, "whoever decodes holds it"
        return llm

    def make(self) -> None:
        """Give the arrays their true size: upstream's are smaller than what the library takes.

        That pads n_ctx to a multiple of 256 (llama.py:483).
        """
        llm = self._llm
        llm.input_ids = np.zeros(llm._n_ctx, dtype=np.intc)
        if self.keeps_rows:
            self._make_scores()

    def refit(self) -> None:
        """Give `input_ids` its size again, after upstream replaced it."""
        llm = self._llm
        llm.input_ids = np.resize(llm.input_ids, llm._n_ctx).astype(np.intc)

    # -- what upstream believes ------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Tokens there are, as upstream believes."""
        return self._llm.n_tokens

    def ids(self) -> Tokens:
        """Their ids, shape (n,), copied."""
        llm = self._llm
        return np.array(llm.input_ids[: llm.n_tokens], dtype=np.int32)

    def mirror(self, ids: Tokens, start: int, tip_logits: bool) -> None:
        """[start, ...) is `ids` from here on, opaque ones left as they are, and nothing follows.

        `tip_logits`: the context has the logits of the last one.
        """
        llm, end = self._llm, start + len(ids)
        np.copyto(llm.input_ids[start:end], ids, where=ids >= 0)
        llm.n_tokens = end
        self.true_rows = min(self.true_rows, end) if start == 0 else self.true_rows
        llm._requires_eval = not tip_logits

    def takes_one(self, n: int) -> bool:
        """Upstream believes in n tokens, too, and one more may be appended without its row."""
        llm = self._llm
        return bool(llm.n_tokens == n and not llm._logits_all)

    def append(self, token: int, n: int) -> None:
        """One token was decoded behind n others; its logits are there."""
        llm = self._llm
        llm.input_ids[n] = token
        llm.n_tokens = n + 1
        llm._requires_eval = False

    def shorten(self, n: int) -> None:
        """Upstream is to believe in n tokens at most."""
        llm = self._llm
        llm.n_tokens = min(llm.n_tokens, n)

    def needs_eval(self, needed: bool) -> None:
        """Whether the last token has to be decoded again before anything is sampled."""
        self._llm._requires_eval = needed

    def reset(self) -> None:
        """There are no tokens."""
        llm = self._llm
        llm.n_tokens = 0
        llm._requires_eval = True

    # -- rows of logits --------------------------------------------------------------------------

    @property
    def keeps_rows(self) -> bool:
        """The logits of every token are kept."""
        return bool(self._llm._logits_all)

    @property
    def room_for_rows(self) -> int:
        """Rows that upstream's array has."""
        return len(self._llm.scores)

    def keep_rows(self, rows: bool) -> None:
        """Keep the logits of every token from here on, as upstream does with a draft model; or as told."""
        self._llm._logits_all = self.always_rows or rows
        if rows:
            self._make_scores()

    def take_rows(self, start: int, end: int) -> None:
        """The context has the logits of [start, end) as its output rows: copy them."""
        llm = self._llm
        rows = native.llama_get_logits(llm._ctx.ctx)
        llm.scores[start:end] = np.ctypeslib.as_array(rows, shape=(end - start, llm._n_vocab))
        if self.true_rows >= start:
            self.true_rows = end

    def _make_scores(self) -> None:
        llm = self._llm
        if len(llm.scores) < llm._n_ctx:
            llm.scores = np.zeros((llm._n_ctx, llm._n_vocab), dtype=np.single)

    # -- while another request has the place ------------------------------------------------------

    def set_aside(self) -> SetAside:
        """What the request that runs needs of upstream's attributes, copied."""
        llm, n = self._llm, self._llm.n_tokens
        return SetAside(
            ids=self.ids(),
            sampler=llm._sampler,
            mirostat=llm._mirostat_mu,
            requires_eval=llm._requires_eval,
            rows=llm.scores[:n].copy() if self.keeps_rows else None,
            true_rows=self.true_rows,
        )

    def bring_back(self, saved: SetAside) -> None:
        """Upstream's attributes are again what they were; the rows follow once memory is (`bring_rows`)."""
        llm, n = self._llm, len(saved.ids)
        llm.input_ids[:n] = saved.ids
        llm.n_tokens = n
        llm._sampler, llm._mirostat_mu = saved.sampler, saved.mirostat
        llm._requires_eval = saved.requires_eval
        self.true_rows = 0

    def bring_rows(self, saved: SetAside) -> None:
        """The rows of logits are again what they were."""
        if saved.rows is not None:
            self._llm.scores[: len(saved.ids)] = saved.rows
            self.true_rows = saved.true_rows
