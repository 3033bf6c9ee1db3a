"""Checkpoints: take those that a schedule asks for, and hand them to the prompt cache; starts of messages.

Chat templates open every message with a control token of the vocabulary (`<|im_start|>`, `<start_of_turn>`)
and mark parts such as thinking with control or user-defined tokens (`<think>`). A history that a client sends
back differs from the evaluated one at such places: `Boundaries` finds them.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from llamahybrid.core.report import Progress
from llamahybrid.core.schedule import Action, Actions
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import LiveState, LiveView, Logits, Tokens, clipped

logger = logging.getLogger("llamahybrid")

_UNASKED, _PLAIN, _OPENS, _CLOSES = -1, 0, 1, 2

CLOSING = 3
"""Most tokens from one that closes a message to the start of the next one: a newline comes between."""


class Boundaries:
    """Finds boundaries by the vocabulary's token attributes; each id is asked about once."""

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        """`vocab`: the native llama_vocab pointer."""
        self._vocab = vocab
        self._kind: npt.NDArray[np.int8] = np.full(n_vocab, _UNASKED, dtype=np.int8)

    def find(self, tokens: Tokens) -> list[int]:
        """Positions in (0, n), ascending, where a message or a marked part starts.

        The start of the second message is moved before the token that closes the first one: more tools or
        instructions make the first one longer.
        """
        known = tokens >= 0  # natively decoded content has none
        ids = np.where(known, tokens, 0)
        for token in np.unique(ids[self._kind[ids] == _UNASKED]).tolist():
            self._kind[token] = self._ask(token)
        positions: list[int] = np.flatnonzero(known & (self._kind[ids] == _OPENS)).tolist()
        inside = positions[1:] if positions[:1] == [0] else positions
        closing = np.flatnonzero(known & (self._kind[ids] == _CLOSES))
        for number, start in enumerate(inside):
            found = closing[(closing > 0) & (closing < start) & (closing >= start - CLOSING)]
            if len(found):
                inside[number] = int(found[-1])
                break
        return inside

    def _ask(self, token: int) -> int:
        attributes = int(llama_cpp.llama_vocab_get_attr(self._vocab, token))
        if llama_cpp.llama_vocab_is_eog(self._vocab, token):
            return _CLOSES
        if attributes & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL:
            return _OPENS
        if attributes & llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED:
            text = llama_cpp.llama_vocab_get_text(self._vocab, token) or b""
            return _OPENS if _is_opening_tag(text) else _PLAIN
        return _PLAIN


def _is_opening_tag(text: bytes) -> bool:
    """`<think>`, `[TOOL]`, `<|x|>`: a marker; not a closing one, and not plain text such as spaces."""
    bracketed = (text[:1], text[-1:]) in ((b"<", b">"), (b"[", b"]"))
    return bracketed and not text.startswith((b"</", b"[/"))


RETURNS = 10
"""Dropped tails of chats for each one that is assumed to be asked for again."""

SEGMENT_TOKENS = 1024
"""Size of stored segments where attention is all of the state, so that any of them is of use."""


@dataclass(frozen=True, eq=False)
class _PromptEnd:
    """A verified prompt, and copies of its tokens and of the logits behind it: callers may change the row."""

    namespace: str
    tokens: Tokens
    logits: Logits

    def lies_in(self, view: LiveView) -> bool:
        """The live tokens begin with this prompt."""
        n = len(self.tokens)
        return self.namespace == view.namespace and np.array_equal(self.tokens, view.tokens[:n])


class Due(NamedTuple):
    """The end of a prompt that is not stored yet, since its first token does not wait for that."""

    request: Progress
    end: _PromptEnd
    since: float
    """By `time.monotonic`."""


class Checkpoints:
    """Takes the checkpoints of one live sequence."""

    def __init__(self, live: LiveSequence, cache: PromptCache, meter: CostMeter) -> None:
        self.known = LiveState(lambda: live.tokens)
        """The live tokens as the cache follows them, and whether they were forgotten."""
        self.owes_since: float | None = None
        """When the last answer ended that did not wait until its attention was stored."""
        self.due: Due | None = None
        self._live = live
        self.cache = cache
        cache.attach(live.shared)
        self.meter = meter
        self._prompt_end: _PromptEnd | None = None

    def view(self, reuse_limit: int | None = None) -> LiveView:
        """Return the cache's view of the live sequence."""
        view = replace(self._live.view(reuse_limit), state=self.known)
        end = self._prompt_end
        if end is None or not view.storable or not end.lies_in(view):
            self._prompt_end = None
            return view
        return replace(view, end_logits=(len(end.tokens), end.logits))

    def depth(self, prompt: Tokens, salt: bytes | None = None) -> int:
        """Return the number of prompt tokens that need no decode now; changes nothing, reads no disk.

        `salt`: the request's; None: that of the live tokens.
        """
        view, identity = self.view(), self._live.identity
        if salt is not None and not identity.serves(salt):
            others = view.tokens[:0]
            view = replace(view, namespace=identity.namespace_of(salt), tokens=others, cut_floor=0)
            view = replace(view, tip_logits=False)
        return self.cache.peek(prompt, view, self.meter.costs())

    def carry_out(
        self, actions: Actions, request: Progress | None = None, *, deep: bool = True, after: int = 0
    ) -> None:
        """Carry out the actions of a schedule, in order; `deep` as in `LiveSequence.fault`.

        `after`: store no attention before this position.
        """
        row = self._live.row
        for action in actions:
            match action:
                case Action.STAGE if request is not None:
                    self.stage(request)
                case Action.ADMIT_STAGED if request is not None:
                    self.admit_staged(request)
                case Action.CHECKPOINT:
                    self.checkpoint(request, deep=deep)
                case Action.CHECKPOINT_IF_FINITE if row.proves_finite():
                    self.checkpoint(request, deep=deep)
                case Action.CHECKPOINT_WITH_LOGITS if request is not None and (end := self._end()):
                    self.due = Due(request, end, time.monotonic())
                case Action.KEEP_LOGITS if not self.known.forgotten:
                    self._prompt_end = self._end() or self._prompt_end
                case Action.REMEMBER:
                    self.cache.remember(self._live.identity.namespace, self._live.tokens.copy(), self.known)
                case Action.PAGE_OUT_LATER if not self.cache.serves_others:
                    self.owes_since = time.monotonic()
                case Action.PAGE_OUT | Action.PAGE_OUT_LATER:
                    self.page_out(deep=deep, after=after)

    def _end(self) -> _PromptEnd | None:
        live, logits = self._live, self._live.row.logits()
        if logits is None:
            return None
        return _PromptEnd(live.identity.namespace, live.tokens.copy(), logits.copy())

    def settle(self) -> None:
        """Store what is `due`, unless something else happened to the sequence since."""
        due, self.due, live = self.due, None, self._live
        if due is None or not np.array_equal(live.tokens, due.end.tokens):
            return
        if live.shared.touched_outside():
            due.request.schedule.stop()
            return
        try:
            self.checkpoint(due.request, due.end.logits)
        except Exception:  # the request that runs now may be another one
            logger.exception("the end of a prompt was not stored")

    def checkpoint(
        self, request: Progress | None, logits: Logits | None = None, *, deep: bool = True
    ) -> bool:
        """Take and store a checkpoint at the tip; False if it cannot be verified or does not fit."""
        clock = time.perf_counter()
        record = self._live.checkpoint(self.cache.buffer, deep=deep)
        if record is None:
            return False
        position = self._live.n
        stored = self.cache.admit(self.view(), position, record, logits)
        self.meter.saved(record.nbytes, time.perf_counter() - clock)
        if request is not None and stored:
            request.schedule.stored(position)
            request.checkpoints += 1
        return stored

    def stage(self, request: Progress) -> None:
        """Copy the tip's state, for `admit_staged` after the prompt is verified."""
        clock = time.perf_counter()
        record = self._live.snapshot(self.cache.buffer, deep=False)
        if record is not None:
            request.staged.append((self._live.n, record))
            self.meter.saved(record.nbytes, time.perf_counter() - clock)

    def admit_staged(self, request: Progress) -> None:
        """Hand this prefill's checkpoints to the cache."""
        if request.staged:
            view = self.view()
            for position, record in request.staged:
                if position <= len(view.tokens) and (view.tokens[:position] >= 0).all():
                    request.checkpoints += self.cache.admit(view, position, record)
            request.staged.clear()

    def page_out(self, *, deep: bool, after: int = 0) -> None:
        """Store the attention that the live sequence's checkpoints need, where it is not stored yet.

        `after`: store none before this position.
        """
        view, live = self.view(), self._live
        ranges = clipped(self.cache.missing(view), len(view.tokens), after)
        if view.attention_is_all:
            ranges = [piece for start, end in ranges for piece in _pieces(start, end)]
        began = time.perf_counter()
        with live.reading():
            for start, end in ranges:
                segment = live.page_out(start, end, partial(self.cache.segment_buffer, view), deep=deep)
                if segment is None or not self.cache.store_segment(view, segment):
                    break
        if ranges:
            self.meter.read(time.perf_counter() - began, live.n)
        self.cache.queue_writes(view)
        self.owes_since = None

    def worth_reading(self, tail: int) -> bool:
        """Storing the attention of the last `tail` live tokens is worth its time.

        The times of reading and decoding are compared only where the pager reads all live tokens, decoding
        was measured, and most tokens remain live. With a longer tail a conversation leaves the slot, and is
        stored.
        """
        pager, n = self._live.profile.pager, self._live.n
        if pager is None or not pager.reads_whole or self.cache.serves_others or 2 * tail > n:
            return True
        prefill = self.meter.costs().prefill_seconds
        return not prefill or tail * prefill >= RETURNS * n * self.meter.read_seconds


def _pieces(start: int, end: int) -> list[tuple[int, int]]:
    """Split [start, end) at multiples of `SEGMENT_TOKENS`."""
    borders = range(start - start % SEGMENT_TOKENS + SEGMENT_TOKENS, end, SEGMENT_TOKENS)
    return list(itertools.pairwise((start, *borders, end)))
