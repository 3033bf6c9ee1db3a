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
from llama_cpp.llama_cache import BaseLlamaCache, LlamaDiskCache, LlamaRAMCache

from llamahybrid.core.runner import Runner
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
    """Load a saved state in place of all live sequences; the context must be idle.

    Raises as `load_into`, unless the state came from the user's own cache, which then takes it back.
    """
    slot = llm.slots.all[0]
    slot.runner.store_attention()
    try:
        load_into(slot, state, native_load)
    except (SnapshotError, RuntimeError):
        cache = llm.user_cache
        if not (isinstance(cache, UsefulStates) and cache.take_back(state)):
            raise


def load_into(
    slot: Slot, state: llama_cpp.LlamaState, native_load: Callable[[llama_cpp.LlamaState], None]
) -> None:
    """Load a saved state with upstream's `load_state`, and adopt the tokens that memory confirms.

    Raises as `check_state` (nothing changed), and RuntimeError if the library refuses the state.
    """
    runner, arrays = slot.runner, slot.view
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


class UsefulStates(BaseLlamaCache):  # type: ignore[misc]
    """A user's cache of whole states, which are loaded only if they save decoding.

    Upstream loads the state with the longest common prefix even if the state cannot be cut back to it, which
    clears live memory and then decodes everything (llama.py:1370). Like upstream, this class uses the cache's
    items alone; upstream's own caches are asked for the key first.
    """

    def __init__(self, inner: Any, depth: Callable[[Tokens], int], cuttable: bool) -> None:
        """`depth(prompt)`: tokens resumable without it; `cuttable`: a loaded state can be cut anywhere."""
        super().__init__(getattr(inner, "capacity_bytes", 0))
        self.inner = inner
        self._offered: tuple[Any, llama_cpp.LlamaState] | None = None
        self._depth = depth
        self._cuttable = cuttable

    @classmethod
    def of(cls, inner: Any, runner: Runner) -> UsefulStates:
        """Wrap a cache for a context."""
        return cls(inner, runner.checkpoints.depth, not runner.live.profile.needs_checkpoints)

    @property
    def cache_size(self) -> int:
        """Bytes in the user's cache; 0: unknown."""
        return int(getattr(self.inner, "cache_size", 0))

    def __bool__(self) -> bool:
        return bool(self.inner)  # as upstream tests the user's cache

    def __getitem__(self, key: Sequence[int]) -> llama_cpp.LlamaState:
        """The state to load for a prompt. Raises KeyError if none saves decoding."""
        prompt = np.asarray(key, dtype=np.int32)
        found = None
        if _names_keys(self.inner):
            found = self.inner._find_longest_prefix_key(tuple(key))
            if found is None:
                raise KeyError("Key not found")
            # A key includes the answer's last token, which was sampled but not decoded.
            self._require_gain(prompt, found, len(found) - 1)
        state = self.inner[key]
        if found is None:
            self._require_gain(prompt, state.input_ids[: state.n_tokens], state.n_tokens)
        self._offered = found, state
        return state

    def _require_gain(self, prompt: Tokens, held: Any, n_decoded: int) -> None:
        """Raise KeyError if a state of these tokens serves no more of a prompt than live state does."""
        common = common_prefix(np.asarray(held, dtype=np.int32), prompt)
        serves = common if self._cuttable or common >= n_decoded else 0
        if serves <= self._depth(prompt):
            raise KeyError("live state and checkpoints already serve this prompt as well")

    def take_back(self, state: llama_cpp.LlamaState) -> bool:
        """Put a state that failed to load back; False if it did not come from this cache.

        The failure counts as a miss: another `Llama` with the same cache may have saved the state.
        """
        offered, self._offered = self._offered, None
        if offered is None or offered[1] is not state:
            return False
        if isinstance(self.inner, LlamaDiskCache) and offered[0] is not None:  # it removes what it returns
            self.inner.cache[offered[0]] = state
        return True

    def __contains__(self, key: Sequence[int]) -> bool:
        return key in self.inner

    def __setitem__(self, key: Sequence[int], value: llama_cpp.LlamaState) -> None:
        self._offered = None
        self.inner[key] = value


def _names_keys(cache: Any) -> bool:
    """Tell whether a cache finds items as upstream's caches do, by `_find_longest_prefix_key`."""
    kind = type(cache)
    return getattr(kind, "__getitem__", None) in _UPSTREAMS and hasattr(kind, "_find_longest_prefix_key")


_UPSTREAMS = LlamaRAMCache.__getitem__, LlamaDiskCache.__getitem__


def user_cache() -> Any:
    """`cache` of `Llama`."""

    def get(llm: Any) -> Any:
        """Upstream's whole-state cache, if one was set.

        A request loads a state from it only if the state serves more of the prompt than live memory and
        checkpoints do; not with several slots or a salt.
        """
        useful, inside = llm.user_cache, llm.requests.inside
        if inside is None:
            return useful.inner if isinstance(useful, UsefulStates) else useful
        alone = not (llm._parallel > 1 or inside.salt)
        return useful if alone else None

    def put(llm: Any, cache: Any) -> None:
        if isinstance(cache, UsefulStates):  # read in a request
            cache = cache.inner
        wrapped = cache is not None and llm.runner is not None
        llm.user_cache = UsefulStates.of(cache, llm.runner) if wrapped else cache

    return property(get, put)
