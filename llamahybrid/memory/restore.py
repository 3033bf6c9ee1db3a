"""Restores, adoptions, undone tokens: a live sequence takes an earlier state, or content of other code.

A plan or an undo says to which state a sequence returns. Content of other code comes from chat handlers that
decode natively (images), and from loaded whole states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from llamahybrid.errors import SnapshotError
from llamahybrid.memory.segment import open_segment
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.state import unknown_ids
from llamahybrid.prompt_cache.base import Bytes, Plan, Segment, Tokens
from llamahybrid.prompt_cache.envelope import open_sealed
from llamahybrid.prompt_cache.nodes import common_prefix


def _opened(
    live: LiveSequence, record: Bytes | None, tokens: Tokens, segments: Sequence[Segment], kept: int
) -> tuple[Bytes | None, list[Bytes]]:
    """Check all that a restore loads; return the PARTIAL state and the stored attention, in order.

    Arguments and errors as `restore`.
    """
    profile, name, position = live.profile, live.identity.namespace, len(tokens)
    if not profile.linear:
        raise SnapshotError("a restore cannot be verified in this memory: its size follows no rule we know")
    if record is None and not profile.attention_is_all:
        raise SnapshotError("attention is not all of this memory's state")
    payload = None if record is None else open_sealed(record, namespace=name, tokens=tokens)
    attention = [open_segment(s, name, tokens[: s.end]) for s in segments]
    sizes = [0 if profile.pager is None else profile.pager.layout.size(s.end - s.start) for s in segments]
    if sizes != [a.nbytes for a in attention]:
        raise SnapshotError("a segment has another layout than this context's")
    if profile.needs_attention:
        starts = [*(s.start for s in segments), position]
        ends = [kept, *(s.end for s in segments)] if segments else [position]
        if starts != ends or common_prefix(live.tokens, tokens) < ends[0]:
            raise SnapshotError(f"attention of [0, {position}) is neither live nor stored")
    return payload, attention


def restore(
    live: LiveSequence,
    record: Bytes | None,
    tokens: Tokens,
    segments: Sequence[Segment] = (),
    kept: int = 0,
    *,
    row_follows: bool = False,
) -> str | None:
    """Restore the state saved in `record`, that of `tokens`, shape (c,); return the fault if that failed.

    Attention KV of [0, c) must be live, or `segments` extend the first `kept` live tokens to c; `record` is
    None where attention is all of the state.
    `row_follows`: the context's output row was computed from that state on.
    Steps, in this order: cut the tail, append attention, load the state, cut to c, verify. The sequence is
    invalid until the last one, so that a fault or an interrupt leaves it invalid.

    Raises SnapshotError, with nothing changed, for a record or a segment that may not be used here.
    """
    state, identity, profile, native = live.state, live.identity, live.profile, live.native
    named, covers = identity.fingerprint, row_follows and state.row_covers_tip
    payload, attention = _opened(live, record, tokens, segments, kept)
    live.release_planes()
    live.invalidate()
    if attention:
        assert profile.pager is not None, "segments were checked against it"
        if not profile.attention_is_all:
            profile.pager.keep_attention(kept)
        elif not native.cut(kept):
            return f"the library refused to cut at {kept} before a restore"
        if not profile.pager.append(attention):
            return "the library refused stored attention"
    if payload is not None and not native.load_partial(payload):
        return f"the library did not read all of {payload.nbytes} snapshot bytes"
    if not native.cut(len(tokens)):
        return f"the library refused to cut at {len(tokens)} after a restore"
    state.replace_tokens(tokens)
    state.lag = state.extra_bytes = 0
    state.grown = False
    fault = live.fault()
    if fault is None and payload is not None and native.state_size(partial=True) != payload.nbytes:
        fault = "the restored state has another size than its snapshot"
    if fault is None and payload is None and not (profile.pager and profile.pager.holds(state.n)):
        fault = "some of the restored attention is not there"
    if named is not identity.fingerprint:
        fault = "another thread has changed what computes"
    if fault:
        live.invalidate()
        return fault
    state.row_covers_tip = covers
    return None


def apply_plan(live: LiveSequence, plan: Plan, tokens: Tokens) -> str | None:
    """Make the sequence `tokens[: plan.cached]` as planned; return the fault if that failed.

    Raises SnapshotError as `restore`.
    """
    if plan.cached == 0:
        live.empty()
        return None
    if plan.checkpoint is not None or plan.segments:
        record = None if plan.checkpoint is None else plan.checkpoint.snapshot
        fault = restore(live, record, tokens[: plan.cached], plan.segments, plan.live_kept)
        if not (plan.live_kept if plan.segments else live.profile.needs_attention):
            live.state.foreign = False  # nothing stayed
    else:
        fault = None if live.cut(plan.cached) else f"the library refused to cut at {plan.cached}"
        fault = fault or live.fault()
    if fault is None and plan.logits is not None and not live.put_logits(plan.logits):
        fault = "the context has no output row to put stored logits into"
    return fault


def recover(live: LiveSequence, undo: tuple[int, Bytes | None]) -> bool:
    """Return to the state before a stopped batch; False if that cannot be verified.

    `undo`: the number of tokens in that state, and its snapshot where the memory cannot be cut.
    """
    position, record = undo
    if record is not None:
        try:
            return restore(live, record, live.state.ids[:position].copy()) is None
        except SnapshotError:  # adapters were changed, or buffers zeroed, since it was taken
            return False
    if not live.cut(position) or live.fault() is not None:
        live.invalidate_tip()
        return False
    return True


def adopt_native(live: LiveSequence, n: int) -> bool:
    """Take over content that other code decoded as an opaque range [live.n, n); False if it is missing.

    `n` counts positions, as chat handlers set `n_tokens` after an image. M-RoPE images have fewer positions
    than cells, so the size rule continues from the measured size.
    """
    state = live.state
    if state.is_invalid or n > live.capacity:
        return False
    if not state.n <= live.native.positions()[1] < n:
        return False
    native = [next(unknown_ids) for _ in range(state.n, n)]
    _take_over(live, np.concatenate([state.tokens, np.array(native, dtype=np.int32)]))
    return True


def adopt_tokens(live: LiveSequence, ids: npt.NDArray[np.integer], *, foreign: bool = False) -> str | None:
    """Make `ids` the live tokens after a whole state was loaded; return the fault if memory disagrees.

    Ids below zero stand for opaque content, with any number of cells. `foreign`: the origin of the state is
    unknown.
    """
    _take_over(live, ids)
    live.state.foreign = foreign
    fault = live.fault()
    if fault:
        live.empty()
    return fault


def _take_over(live: LiveSequence, ids: npt.NDArray[np.integer]) -> None:
    """Make `ids` the tokens of content that other code decoded or loaded."""
    state = live.state
    state.replace_tokens(ids)
    live.planes.invalidate()
    state.grown = state.tip_logits = False
    state.lag = state.extra_bytes = 0
    if state.opaque:
        state.lag = _lag(state.tokens, live.native.positions()[1])
        state.extra_bytes = live.extra_bytes(state.n)
    live.shared.recount()


def _lag(tokens: Tokens, last: int) -> int:
    """Return `SequenceState.lag` for the last position `last`, which may lie in native content at the end."""
    known = np.flatnonzero(tokens >= 0)
    start = int(known[-1]) + 1 if len(known) else 0
    return len(tokens) - 1 - last if start <= last < len(tokens) else 0


Rollback: TypeAlias = Literal["cut", "planes", "snapshot"]
"""The way in which tokens were taken back: attention was cut, a rollback plane became the state, a snapshot
was loaded (the tokens behind it are then decoded again)."""


class Undo:
    """The live sequence's state before tokens that may have to go again."""

    def __init__(self, live: LiveSequence) -> None:
        self._live = live
        self._record: Bytes = np.empty(0, dtype=np.uint8)
        self._tokens: Tokens | None = None
        self._named = b"", False

    @property
    def position(self) -> int | None:
        """Tokens of the state that is saved, where it is one of this history; else None."""
        if self._tokens is None or not self._live.state.starts_with(self._tokens):
            return None
        named = self._live.fingerprint, self._live.state.foreign
        if self._named != named:  # saved for another salt, or on top of a state that is gone
            return None
        return len(self._tokens)

    def take(self) -> None:
        """Save the tip's state, unless it is saved already or memory can be cut."""
        live = self._live
        if live.profile.cuttable or not live.profile.linear or self.position == live.n:
            return
        self._tokens = None  # an interrupt below must not leave them beside another state
        if live.snapshot(self._buffer) is not None:
            self._named = live.fingerprint, live.state.foreign
            self._tokens = live.tokens.copy()

    def drop(self) -> None:
        """Discard the saved state, which may be the reason why a request failed."""
        self._tokens = None

    def go_back(self, n: int) -> Rollback | None:
        """Take back the tokens behind the first n; return the way, or None if no exact one is known.

        After "snapshot" fewer than n tokens may be left: the others must be decoded again.
        """
        live, position = self._live, self.position
        if live.cut(n):
            return "planes" if live.planes.pending else "cut"
        if position is None or position > n:
            return None
        if restore(live, self._record, live.tokens[:position].copy(), row_follows=True) is not None:
            return None
        return "snapshot"

    def _buffer(self, n_bytes: int) -> Bytes:
        if self._record.nbytes != n_bytes:
            self._record = np.empty(n_bytes, dtype=np.uint8)
        return self._record
