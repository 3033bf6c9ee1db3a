"""Belief: what one context's memory is taken to hold, and how that is checked against the memory.

It is a list of token ids. Whatever cannot be proven right is marked as *junk* (an id that no prompt has), so
that nothing built on it is ever reused; the next alignment cuts or restores below it, or clears.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.paging import Splitter
from llamahybrid.memory.planes import Planes
from llamahybrid.memory.profile import MemoryProfile
from llamahybrid.prompt_cache.base import HERE_ONLY, LiveView, Logits, Tokens

if TYPE_CHECKING:
    from llama_cpp._internals import LlamaContext

    from llamahybrid.memory.fingerprint import Computation

JUNK = int(np.iinfo(np.int32).min)

unknown_ids = itertools.count(-1, -1)
"""Ids of content that is not known as tokens: each is given once, and no prompt has any."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two id arrays."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


class Belief:
    """The tokens of sequence 0 of one context, and whether its memory bears them out."""

    def __init__(
        self, ctx: LlamaContext, profile: MemoryProfile, *, fingerprint: bytes, capacity: int, n_vocab: int
    ) -> None:
        """`fingerprint`: 16 bytes naming what stored state is valid for; `capacity`: tokens, n_ctx."""
        self.profile = profile
        self.fingerprint = fingerprint
        self.computation: Computation | None = None
        """What computes; None: what `fingerprint` names stays."""
        self.capacity = capacity
        self.n_vocab = n_vocab
        self.tip_logits = False
        self.vouched = False
        """The last output row was computed from a state that the tip's went into (see `is_finite`)."""
        self._native = NativeContext(ctx)
        self.planes = Planes(self._native)
        self._ids: Tokens = np.zeros(capacity + 1, dtype=np.int32)
        self._n = 0
        self._lag = 0
        self._extra_bytes = 0
        self._tainted = False
        self._split_for(fingerprint)
        self._grown = True  # by our own decodes alone, since it was empty
        self._counters = self._native.counters()

    @property
    def n(self) -> int:
        """Tokens in the sequence."""
        return self._n

    @property
    def tokens(self) -> Tokens:
        """The ids, shape (n,); negative where content is unknown. A view: copy to keep."""
        return self._ids[: self._n]

    @property
    def is_junk(self) -> bool:
        """The state at the tip is not to be used: an operation did not finish, or was not ours."""
        return self._n > 0 and bool(self._ids[self._n - 1] == JUNK)

    @property
    def opaque(self) -> bool:
        """Part of the sequence was decoded natively (an image, audio) or is not known."""
        return bool((self.tokens < 0).any())

    def holds(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is sound and is exactly `ids`, opaque positions aside."""
        return self._n == len(ids) and self.starts_with(ids)

    def starts_with(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is sound and begins with `ids`, opaque positions aside."""
        if self._n < len(ids) or self.is_junk:
            return False
        own = self._ids[: len(ids)]
        return bool(np.array_equal(own, ids) or np.all((own == ids) | (own < 0)))

    @property
    def namespace(self) -> str:
        """The fingerprint as the prompt cache knows it."""
        nameless = self.computation is not None and self.computation.nameless
        return self.fingerprint.hex() + (HERE_ONLY if nameless else "")

    def view(self, reuse_limit: int | None = None) -> LiveView:
        """The sequence as the prompt cache needs to know it (tokens are copied)."""
        return LiveView(
            namespace=self.namespace,
            tokens=self.tokens.copy(),
            cut_floor=self.profile.cut_floor(self._n, self._native.positions()[0]),
            needs_checkpoints=self.profile.needs_checkpoints,
            needs_attention=self.profile.needs_attention,
            tip_logits=self.tip_logits,
            reuse_limit=reuse_limit,
            split=self._splitter,
        )

    @property
    def keeps_chats(self) -> bool:
        """A checkpoint taken here can serve after another conversation was live."""
        profile = self.profile
        return profile.needs_checkpoints and (profile.pager is not None or not profile.needs_attention)

    def logits(self) -> Logits | None:
        """The logits of the last token, shape (n_vocab,), as a view; None when they are not live."""
        return self._native.logits(self.n_vocab) if self.tip_logits else None

    def is_finite(self) -> bool:
        """The tip's state is free of NaN: nothing that gets into a state leaves it, so a later row tells."""
        row = self._native.logits(self.n_vocab) if self.vouched else None
        return row is not None and bool(np.isfinite(row).all())

    def can_take_logits(self) -> bool:
        """There is an output row that stored logits can be put into (see `put_logits`)."""
        return self._native.logits(self.n_vocab) is not None

    def fault(self, *, deep: bool = True) -> str | None:
        """Why memory is not what is believed; None when it is.

        `deep` adds the size rule, which sees duplicated and missing cells (0.7 ms at 30k cells).
        """
        if self.is_junk:
            return "the last operation did not finish"
        fault = self.profile.position_fault(self._n - self._lag, *self._native.positions())
        if fault or not deep or self._n == 0:
            return fault
        if not self.profile.linear:
            return None
        size = self._attention_bytes()
        expected = self.profile.predicted_size(self._n) + self._extra_bytes
        return None if size == expected else f"state has {size} bytes, expected {expected}"

    def learn_size_rule(self) -> bool:
        """Look at the size rule after a prefill; False when memory is not what it should be.

        A sequence that grew by our own decodes alone and breaks the rule refutes it (compressed attention,
        src/llama-kv-cache-dsv4.cpp): restores cannot be verified there, and only the tip is reused.
        """
        fault = self.fault()
        if fault is None:
            return True
        if not self._grown or self.fault(deep=False) is not None:
            return False
        self.profile = replace(self.profile, linear=False)
        return True

    def touched_outside(self) -> bool:
        """Someone decoded on this context, or reset its counters, since our last operation."""
        return self._native.counters() != self._counters

    def memory_bytes(self) -> int:
        """Bytes of the buffers of cells and states; 0 where the library does not say."""
        return self._native.memory_bytes()

    def recount(self) -> None:
        """Take the library's counters as they are now for ours."""
        self._counters = self._native.counters()

    def computed_by(self, computation: Computation) -> None:
        """From now on something else computes: what is live can be gone on from, and is never stored.

        Safe beside a thread that decodes: whatever it stores has the old name, or an unknown first token.
        """
        self.computation = computation
        if computation.fingerprint == self.fingerprint:
            return
        self._disown()
        self._split_for(computation.fingerprint)
        self.fingerprint = computation.fingerprint

    def _disown(self) -> None:
        """Nothing live is known as tokens of a prompt: one id that no prompt has is enough, the first."""
        if self._n > 0 and self._ids[0] != JUNK:
            self._ids[0] = next(unknown_ids)

    def verify_model(self) -> None:
        """Notice that somebody has written to the files that the model is mapped from."""
        if self.computation is not None and self.computation.model.edited():
            self.computed_by(replace(self.computation))

    def _split_for(self, fingerprint: bytes) -> None:
        pager = self.profile.pager
        self._splitter = Splitter(pager.layout, fingerprint) if pager is not None else None

    def distrust(self) -> None:
        """Nothing that the context holds is known any more; the next alignment starts from zero."""
        self._n = 0
        self._mark_junk()

    def taint(self) -> None:
        """Numbers that are not finite got into memory: the next `empty` zeroes the buffers.

        Rows are otherwise cleared by a multiplication with 0, which NaN survives (src/llama-graph.cpp:3530).
        """
        self._tainted = True
        self._mark_junk()

    # -- for `LiveSequence` ------------------------------------------------------------------------

    def _set(self, ids: npt.NDArray[np.integer]) -> None:
        self.vouched = False
        self._ids[: len(ids)] = ids
        self._n = len(ids)

    def _mark_junk(self) -> None:
        """Put an id that matches nothing at the tip: state there is not to be used."""
        self.tip_logits = self.vouched = False
        self.planes.void()
        if not self.is_junk:
            self._ids[self._n] = JUNK
            self._n += 1

    def _attention_bytes(self) -> int:
        full = self._native.state_size(partial=False)
        if self.profile.partial_is_partial:
            return full - self._partial_bytes()
        return 0 if self.profile.keeps_tip_only else full

    def _partial_bytes(self) -> int:
        """Bytes of the PARTIAL state: a constant of recurrent memory, which need not be asked for again."""
        return self.profile.snapshot_bytes or self._native.state_size(partial=True)
