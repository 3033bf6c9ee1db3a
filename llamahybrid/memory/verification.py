"""Whether a context's memory is what its `SequenceState` says: positions always, sizes when asked.

Duplicated and missing cells do not show in positions; they do in the size of the state. What both must be is
in `MemoryProfile`.
"""

from __future__ import annotations

from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.profile import MemoryProfile
from llamahybrid.memory.state import SequenceState


def memory_fault(
    native: NativeContext, profile: MemoryProfile, state: SequenceState, *, deep: bool = True
) -> str | None:
    """Why memory is not what `state` says; None when it is.

    `deep` adds the size rule (0.7 ms at 30k cells).
    """
    if state.is_invalid:
        return "the last operation did not finish"
    fault = profile.position_fault(state.n - state.lag, *native.positions())
    if fault or not deep or state.n == 0 or not profile.linear:
        return fault
    size = attention_bytes(native, profile)
    expected = profile.predicted_size(state.n) + state.extra_bytes
    return None if size == expected else f"state has {size} bytes, expected {expected}"


def refutes_size_rule(native: NativeContext, profile: MemoryProfile, state: SequenceState) -> bool:
    """Memory that breaks the size rule and is right all the same: its positions are, and we alone decoded.

    So it is with compressed attention (src/llama-kv-cache-dsv4.cpp): restores cannot be verified there.
    """
    return state.grown and memory_fault(native, profile, state, deep=False) is None


def extra_bytes(native: NativeContext, profile: MemoryProfile, n: int) -> int:
    """Bytes of attention beyond what the size rule says of n tokens."""
    return attention_bytes(native, profile) - profile.predicted_size(n)


def attention_bytes(native: NativeContext, profile: MemoryProfile) -> int:
    """Bytes of attention state in memory, as the size rule counts them."""
    full = native.state_size(partial=False)
    if profile.partial_is_partial:
        return full - partial_bytes(native, profile)
    return 0 if profile.keeps_tip_only else full


def partial_bytes(native: NativeContext, profile: MemoryProfile) -> int:
    """Bytes of the PARTIAL state: a constant of recurrent memory, which need not be asked for again."""
    return profile.snapshot_bytes or native.state_size(partial=True)
