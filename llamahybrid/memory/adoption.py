"""Adoption: content that others put into context memory is taken for what a live sequence holds.

Others are chat handlers that decode natively (images), whole states that were loaded, other sequences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamahybrid.memory import verification
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.state import unknown_ids
from llamahybrid.prompt_cache.base import Tokens


def adopt_native(live: LiveSequence, n: int) -> bool:
    """Take content that other code decoded as an opaque range [live.n, n); False if it is not there.

    `n` counts positions, as chat handlers set `n_tokens` after an image (M-RoPE images take fewer
    positions than cells, so the size rule starts anew from what is measured).
    """
    state = live.state
    if state.is_invalid or n > live.capacity:
        return False
    if not state.n <= live.native.positions()[1] < n:
        return False
    for i in range(state.n, n):
        state.ids[i] = next(unknown_ids)
    state.lag = n - 1 - live.native.positions()[1]
    state.n = n
    live.planes.invalidate()
    state.row_covers_tip = False
    state.grown = False
    state.extra_bytes = verification.extra_bytes(live.native, live.profile, n)
    state.tip_logits = False
    live.shared.recount()
    return True


def adopt_tokens(live: LiveSequence, ids: npt.NDArray[np.integer], *, foreign: bool = False) -> str | None:
    """Take `ids` for what is live after a whole state was loaded; the fault if memory disagrees.

    Ids below zero stand for opaque content, whose cells are taken as they are. `foreign`: nothing says that
    this model computed it.
    """
    state = live.state
    state.replace_tokens(ids)
    live.planes.invalidate()
    state.grown, state.foreign = False, foreign
    state.extra_bytes = 0
    state.lag = 0
    if state.opaque:
        state.lag = _lag(state.tokens, live.native.positions()[1])
        state.extra_bytes = verification.extra_bytes(live.native, live.profile, state.n)
    state.tip_logits = False
    live.shared.recount()
    fault = live.fault()
    if fault:
        live.empty()
    return fault


def _lag(tokens: Tokens, last: int) -> int:
    """See `SequenceState.lag`, where `last` is the last position: it may lie in native content at the end."""
    known = np.flatnonzero(tokens >= 0)
    start = int(known[-1]) + 1 if len(known) else 0
    return len(tokens) - 1 - last if start <= last < len(tokens) else 0


def take_over(live: LiveSequence, other: LiveSequence) -> None:
    """What another sequence of this context holds is this one's from now on; nothing, if that fails."""
    live.empty()
    row = other.row.logits()
    logits = None if row is None else row.copy()
    if other.state.is_invalid or not other.n:
        return
    live.invalidate()
    copied = _copy(live, other)
    live.state.take_over(other.state)
    if not copied or live.fault() is not None:
        live.empty()
    elif logits is not None:
        live.put_logits(logits)


def _copy(live: LiveSequence, other: LiveSequence) -> bool:
    """Have memory hold as one sequence what it holds as another; False where it does not.

    As a state: copies between KV streams come late, and replace what was loaded meanwhile.
    """
    state = other.native.state()
    loaded = state is not None and live.native.load(state)
    return loaded and live.native.state_size(partial=False) == other.native.state_size(partial=False)
