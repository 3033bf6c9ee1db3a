"""Verification: compare a context's memory with its `SequenceState`, by positions and by size.

Duplicated and missing cells show in the size of the state, not in positions. `MemoryProfile` has the rules
for both.
"""

from __future__ import annotations

from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.profile import MemoryProfile
from llamahybrid.memory.state import SequenceState


def memory_fault(
    native: NativeContext, profile: MemoryProfile, state: SequenceState, *, deep: bool = True
) -> str | None:
    """Return the fault of memory, compared with `state`; None if there is none.

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
    """Memory breaks the size rule, but its positions are right, and only we decoded.

    An example is compressed attention (src/llama-kv-cache-dsv4.cpp), whose restores cannot be verified.
    """
    return state.grown and memory_fault(native, profile, state, deep=False) is None


def extra_bytes(native: NativeContext, profile: MemoryProfile, n: int) -> int:
    """Return the bytes of attention beyond the size rule for n tokens."""
    return attention_bytes(native, profile) - profile.predicted_size(n)


def attention_bytes(native: NativeContext, profile: MemoryProfile) -> int:
    """Return the bytes of attention state in memory, as the size rule counts them."""
    full = native.state_size(partial=False)
    if profile.partial_is_partial:
        return full - partial_bytes(native, profile)
    return 0 if profile.keeps_tip_only else full


def partial_bytes(native: NativeContext, profile: MemoryProfile) -> int:
    """Return the bytes of the PARTIAL state, which are constant in recurrent memory."""
    return profile.snapshot_bytes or native.state_size(partial=True)
