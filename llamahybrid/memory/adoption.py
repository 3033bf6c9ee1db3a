"""Adoption: a live sequence takes over content that other code put into context memory.

Sources are chat handlers that decode natively (images), and loaded whole states.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.state import unknown_ids
from llamahybrid.prompt_cache.base import Tokens


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
    for i in range(state.n, n):
        state.ids[i] = next(unknown_ids)
    state.lag = n - 1 - live.native.positions()[1]
    state.n = n
    live.planes.invalidate()
    state.row_covers_tip = False
    state.grown = False
    state.extra_bytes = live.extra_bytes(n)
    state.tip_logits = False
    live.shared.recount()
    return True


def adopt_tokens(live: LiveSequence, ids: npt.NDArray[np.integer], *, foreign: bool = False) -> str | None:
    """Make `ids` the live tokens after a whole state was loaded; return the fault if memory disagrees.

    Ids below zero stand for opaque content, with any number of cells. `foreign`: the origin of the state is
    unknown.
    """
    state = live.state
    state.replace_tokens(ids)
    live.planes.invalidate()
    state.grown, state.foreign = False, foreign
    state.extra_bytes = 0
    state.lag = 0
    if state.opaque:
        state.lag = _lag(state.tokens, live.native.positions()[1])
        state.extra_bytes = live.extra_bytes(state.n)
    state.tip_logits = False
    live.shared.recount()
    fault = live.fault()
    if fault:
        live.empty()
    return fault


def _lag(tokens: Tokens, last: int) -> int:
    """Return `SequenceState.lag` for the last position `last`, which may lie in native content at the end."""
    known = np.flatnonzero(tokens >= 0)
    start = int(known[-1]) + 1 if len(known) else 0
    return len(tokens) - 1 - last if start <= last < len(tokens) else 0
