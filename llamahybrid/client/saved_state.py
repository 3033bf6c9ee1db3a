"""Safe versions of upstream's whole-state interfaces: `save_state`, `load_state` and `set_cache`.

A `LlamaState` that we save has a seal: a checksum, the identity of its model, and the logits at its end. A
state saved by upstream has none and is loaded unchecked, as upstream does. Its model is unknown, so states
derived from it get no seal and are not stored in the prompt cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import xxhash
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from llamahybrid.core.slot import Slot
from llamahybrid.errors import SnapshotError
from llamahybrid.memory.fingerprint import Computation, with_salt
from llamahybrid.memory.restore import adopt_tokens
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Logits, Tokens
from llamahybrid.prompt_cache.nodes import common_prefix

SEAL = "llamahybrid"


@dataclass(frozen=True)
class StateSeal:
    """Metadata of a `LlamaState`. A pickled seal identifies the model by content."""

    fingerprint: bytes
    checksum: int
    """xxh3-64 of the native bytes, the ids and the logits."""
    tokens: Tokens
    """Ids of the sequence, shape (n_tokens,); negative for content that a chat handler decoded natively."""
    logits: Logits | None
    score_rows: int
    """Rows of the state's `scores` that belong to its tokens."""
    computation: Computation | None = field(default=None, compare=False, repr=False)
    """Model and context that computed it; known within this process alone."""
    salt: bytes = field(default=b"", compare=False, repr=False)
    """Digest of the requests' salt; known within this process alone."""

    def __reduce__(self) -> tuple[type[StateSeal], tuple[Any, ...]]:
        name = self.fingerprint
        if self.computation is not None:
            name = with_salt(self.computation.portable(), self.salt)
        return StateSeal, (name, self.checksum, self.tokens, self.logits, self.score_rows)

    def belongs_to(self, live: LiveSequence) -> bool:
        """Tell whether the state is of the same model and context as `live`, also from another process."""
        if self.fingerprint == live.fingerprint:
            return True
        if self.computation is not None:
            return False
        return self.fingerprint == with_salt(live.identity.computation.portable(), live.identity.salt)


def seal_state(state: llama_cpp.LlamaState, live: LiveSequence, score_rows: int) -> llama_cpp.LlamaState:
    """Attach the seal to a state just saved from `live`."""
    logits, tokens = live.row.logits(), live.tokens.copy()
    kept = None if logits is None else logits.copy()
    checksum = _checksum(state.llama_state, tokens, kept)
    identity = live.identity
    known = identity.computation, identity.salt
    seal = StateSeal(identity.fingerprint, checksum, tokens, kept, score_rows, *known)
    setattr(state, SEAL, seal)
    return state


def _checksum(native: bytes, tokens: Tokens, logits: Logits | None) -> int:
    hasher = xxhash.xxh3_64(native)
    hasher.update(tokens.tobytes())
    hasher.update(b"" if logits is None else logits.tobytes())
    return hasher.intdigest()


def check_state(state: llama_cpp.LlamaState, live: LiveSequence) -> None:
    """Raise SnapshotError for a sealed state that is damaged, or of another model or context shape."""
    if state.llama_state_size != len(state.llama_state):
        raise SnapshotError(f"state is truncated: {len(state.llama_state)} of {state.llama_state_size} bytes")
    if not 0 <= state.n_tokens <= min(live.capacity, len(state.input_ids)):
        raise SnapshotError(f"state of {state.n_tokens} tokens does not fit a context of {live.capacity}")
    if np.ndim(state.scores) != 2 or state.scores.shape[1] != live.n_vocab:
        raise SnapshotError(
            f"state has scores of shape {np.shape(state.scores)}, expected (n, {live.n_vocab})"
        )
    seal: StateSeal | None = getattr(state, SEAL, None)
    if seal is None:
        return
    if not seal.belongs_to(live):
        raise SnapshotError("state belongs to another model, engine or context shape")
    ids = np.asarray(state.input_ids[: state.n_tokens])
    same = len(seal.tokens) == len(ids) and bool(np.all((seal.tokens == ids) | (seal.tokens < 0)))
    if not same or seal.checksum != _checksum(state.llama_state, seal.tokens, seal.logits):
        raise SnapshotError("state is damaged")


def fit_scores(state: llama_cpp.LlamaState, rows: int) -> tuple[llama_cpp.LlamaState, int]:
    """Return the state with the rows of scores that upstream copies, and the number of rows of its tokens.

    `rows`: rows of the context, which has more if it keeps the logits of every token.
    """
    seal: StateSeal | None = getattr(state, SEAL, None)
    have, wanted = len(state.scores), min(state.n_tokens, rows)
    true = min(wanted, have if seal is None else seal.score_rows)
    if have == wanted:
        return state, true
    scores = np.zeros((wanted, state.scores.shape[1]), state.scores.dtype)
    scores[: min(have, wanted)] = state.scores[:wanted]
    fitted = copy.copy(state)
    fitted.scores = scores
    return fitted, true


def save(llm: Any, native_save: Callable[[], llama_cpp.LlamaState]) -> llama_cpp.LlamaState:
    """Save the calling thread's sequence with upstream's `save_state`, sealed; the context must be idle."""
    slot = llm.slots.all[0]
    llm.requests.alone(Slot.bring)  # a request of another salt may have run since
    state = native_save()
    if llm.offload.watch is not None:
        llm.offload.watch.check()
    live = slot.live
    return state if live.state.foreign else seal_state(state, live, slot.view.true_rows)


def load(llm: Any, state: llama_cpp.LlamaState, native_load: Callable[[llama_cpp.LlamaState], None]) -> None:
    """Load a saved state with upstream's `load_state`, in place of all live sequences; the context is idle.

    The tokens that memory confirms are adopted. Raises as `check_state` (nothing changed), and RuntimeError
    if the library refuses the state.
    """
    slot = llm.slots.all[0]
    runner, arrays = slot.runner, slot.view
    runner.store()
    live = runner.live
    check_state(state, live)
    state, rows = fit_scores(state, len(arrays.scores))
    live.invalidate()
    arrays.true_rows = 0
    try:
        native_load(state)
    except BaseException:
        arrays.shorten(0)
        raise
    finally:
        arrays.refit()
    arrays.true_rows = rows if arrays.logits_all else 0
    seal: StateSeal | None = getattr(state, SEAL, None)
    ids = np.asarray(state.input_ids[: state.n_tokens]) if seal is None else seal.tokens
    arrays.note_native(ids)
    if adopt_tokens(live, ids, foreign=seal is None) is None and live.n:
        if seal is not None and seal.logits is not None:
            live.put_logits(seal.logits)
        slot.keep_tail()
        logits = live.row.logits()
        arrays.requires_eval = logits is None
        if live.profile.needs_checkpoints:
            runner.checkpoints.checkpoint(None, None if logits is None else logits.copy())


def load_from(cache: Any, llm: Any, prompt: Sequence[int]) -> llama_cpp.LlamaState:
    """Load the state of a user's cache that serves most of a prompt, and return it.

    Raises KeyError if none serves more of it than live state and checkpoints do: upstream loads the one with
    the longest common prefix even if it cannot be cut back to that, which clears live memory and then decodes
    everything (llama.py:1370). A state that fails to load is a miss, too: another `Llama` with the same cache
    may have saved it. Upstream's caches are asked for the key first: that on disk removes what it returns.
    """
    runner, ids = llm.runner, np.asarray(prompt, dtype=np.int32)

    def require_gain(held: Any, n_decoded: int) -> None:
        common = common_prefix(np.asarray(held, dtype=np.int32), ids)
        cuttable = not runner.live.profile.needs_checkpoints
        if (common if cuttable or common >= n_decoded else 0) <= runner.checkpoints.depth(ids):
            raise KeyError("live state and checkpoints already serve this prompt as well")

    key = None
    if type(cache).__getitem__ in _UPSTREAMS and hasattr(cache, "_find_longest_prefix_key"):
        key = cache._find_longest_prefix_key(tuple(prompt))
        if key is None:
            raise KeyError("Key not found")
        require_gain(key, len(key) - 1)  # the answer's last token was sampled, and not decoded
    state = cache[prompt]
    if key is None:
        require_gain(state.input_ids[: state.n_tokens], state.n_tokens)
    try:
        llm.load_state(state)
    except (SnapshotError, RuntimeError) as error:
        if isinstance(cache, LlamaDiskCache) and key is not None:
            cache.cache[key] = state
        raise KeyError("the state does not fit this model") from error
    return state


_UPSTREAMS = LlamaRAMCache.__getitem__, LlamaDiskCache.__getitem__
