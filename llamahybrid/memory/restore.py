"""Back to an earlier state: what a restore needs, and the ways a plan or an undo takes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamahybrid.errors import SnapshotError
from llamahybrid.memory.paging import open_segment
from llamahybrid.memory.profile import MemoryProfile
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Bytes, Plan, Segment, Tokens
from llamahybrid.prompt_cache.envelope import open_sealed
from llamahybrid.prompt_cache.nodes import common_prefix


@dataclass(frozen=True)
class Restorable:
    """State that may be loaded: its checksums hold, and it is of these tokens and what computes here."""

    position: int
    """Tokens [0, position) were decoded when it was saved."""
    payload: Bytes | None
    """The PARTIAL state, shape (n,); None where attention is all of it."""
    attention: tuple[Bytes, ...]
    """Stored attention, in order; empty where all of it is live."""


def open_restorable(
    record: Bytes | None,
    tokens: Tokens,
    segments: Sequence[Segment],
    kept: int,
    live: Tokens,
    *,
    namespace: str,
    profile: MemoryProfile,
) -> Restorable:
    """Check a snapshot record of `tokens`, shape (c,), and the attention that goes with it.

    Attention of [0, c) must be `live`, or `segments` bring it behind the first `kept` live tokens; `record`
    is None where it is all of the state.
    Raises SnapshotError when the record or a segment may not be used here.
    """
    if not profile.linear:
        raise SnapshotError("a restore cannot be verified in this memory: its size follows no rule we know")
    if record is None and not profile.attention_is_all:
        raise SnapshotError("attention is not all of this memory's state")
    position = len(tokens)
    payload = None if record is None else open_sealed(record, namespace=namespace, tokens=tokens)
    attention = tuple(open_segment(s, namespace, tokens[: s.end]) for s in segments)
    sizes = [0 if profile.pager is None else profile.pager.layout.size(s.end - s.start) for s in segments]
    if sizes != [a.nbytes for a in attention]:
        raise SnapshotError("a segment has another layout than this context's")
    if profile.needs_attention:
        starts = [*(s.start for s in segments), position]
        ends = [kept, *(s.end for s in segments)] if segments else [position]
        if starts != ends or common_prefix(live, tokens) < ends[0]:
            raise SnapshotError(f"attention of [0, {position}) is neither live nor stored")
    return Restorable(position, payload, attention)


def restore(
    live: LiveSequence,
    record: Bytes | None,
    tokens: Tokens,
    segments: Sequence[Segment] = (),
    kept: int = 0,
    *,
    row_follows: bool = False,
) -> str | None:
    """Go to the state saved in `record`, that of `tokens` (shape (c,)); the fault if it failed.

    Attention KV of [0, c) must be live, or `segments` bring it behind the first `kept` live tokens;
    `record` is None where that is all of the state.
    `row_follows`: the output row that is there was computed from that state on.
    The order matters: cut to what stays, append, load, cut the tail, verify. Until that is through the
    sequence is invalid: whatever leaves here early, a fault or an interrupt, leaves it so.

    Raises SnapshotError, with nothing changed, when the record or a segment may not be used here.
    """
    state, identity, profile, native = live.state, live.identity, live.profile, live.native
    named, covers = identity.fingerprint, row_follows and state.row_covers_tip
    there = state.tokens
    name = identity.namespace
    saved = open_restorable(record, tokens, segments, kept, there, namespace=name, profile=profile)
    live.release_planes()
    live.invalidate()
    if saved.attention:
        assert profile.pager is not None, "segments were checked against it"
        if not profile.attention_is_all:
            profile.pager.keep_attention(kept)
        elif not native.cut(kept):
            return f"the library refused to cut at {kept} before a restore"
        if not profile.pager.append(saved.attention):
            return "the library refused stored attention"
    payload = saved.payload
    if payload is not None and not native.load_partial(payload):
        return f"the library did not read all of {payload.nbytes} snapshot bytes"
    if not native.cut(saved.position):
        return f"the library refused to cut at {saved.position} after a restore"
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
    """Make the sequence `tokens[: plan.cached]` as planned; the fault if memory does not bear it out.

    Raises SnapshotError when the plan's snapshot or a segment may not be used here (nothing changed).
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
    """Go back to before a batch that was stopped inside, as `undo` of then says; False if not proven.

    `undo`: tokens there were, and a snapshot of that state where the memory cannot be cut.
    """
    position, record = undo
    if record is not None:
        return restore(live, record, live.state.ids[:position].copy()) is None
    if not live.cut(position) or live.fault() is not None:
        live.invalidate_tip()
        return False
    return True
