"""Upstream's whole-state interfaces made safe: `save_state` and `load_state`.

A `LlamaState` we save carries what is needed to tell damage and foreign models, and the logits of its tip.
One that upstream saved carries none of that: it is taken as upstream takes it, its bytes unchecked. It may be
another model's, so that nothing that rests on it is sealed, or stored in the prompt cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import xxhash

from llamahybrid.core.executor import Executor
from llamahybrid.errors import SnapshotError
from llamahybrid.memory.adoption import adopt_tokens
from llamahybrid.memory.fingerprint import Computation, with_salt
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Logits, Tokens

logger = logging.getLogger("llamahybrid")

SEAL = "llamahybrid"


@dataclass(frozen=True)
class StateSeal:
    """What rides along with a `LlamaState`. Pickled, it says what it belongs to by content."""

    fingerprint: bytes
    checksum: int
    """xxh3-64 of the native bytes, the ids and the logits."""
    tokens: Tokens
    """Ids of the sequence, shape (n_tokens,); negative where content was decoded natively."""
    logits: Logits | None
    score_rows: int
    """Rows of the state's `scores` that are those of its tokens."""
    computation: Computation | None = field(default=None, compare=False, repr=False)
    """What it was computed by, within this process."""
    salt: bytes = field(default=b"", compare=False, repr=False)
    """Digest of the salt of the requests that it was computed for, within this process."""

    def __reduce__(self) -> tuple[type[StateSeal], tuple[Any, ...]]:
        name = self.fingerprint
        if self.computation is not None:
            name = with_salt(self.computation.portable(), self.salt)
        return StateSeal, (name, self.checksum, self.tokens, self.logits, self.score_rows)

    def belongs_to(self, live: LiveSequence) -> bool:
        """The state was saved by what computes `live`, here or (as far as pickled) in another process."""
        if self.fingerprint == live.fingerprint:
            return True
        if self.computation is not None or live.identity.computation is None:
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
    """Raise SnapshotError for a sealed state that is damaged or of another model or context shape."""
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
    """The state with as many rows of scores as upstream copies, and how many of them are its tokens'.

    `rows`: those that there is room for. A context that keeps the logits of every token has more of them than
    one that does not.
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
    """What the calling thread has live, by upstream's `save_state`, sealed; while nobody else is in."""
    executor = llm.slots.all[0].executor
    llm.requests.alone(Executor.bring)  # the end of an answer may come after another salt's request
    state = native_save()
    if llm.offload.watch is not None:
        llm.offload.watch.check()
    live = executor.live
    return state if live.state.foreign else seal_state(state, live, executor.view.true_rows)


def load(llm: Any, state: llama_cpp.LlamaState, native_load: Callable[[llama_cpp.LlamaState], None]) -> None:
    """Make a saved state what is live, in place of all else; while nobody else is in.

    Raises as `load_into`.
    """
    executor = llm.slots.all[0].executor
    executor.runner.store_attention()
    load_into(executor, state, native_load)


def load_into(
    executor: Executor, state: llama_cpp.LlamaState, native_load: Callable[[llama_cpp.LlamaState], None]
) -> None:
    """Make a saved state the current one, by upstream's `load_state`, and believe what memory bears out.

    Raises as `check_state` (nothing changed), and RuntimeError when the library does not take it.
    """
    runner, arrays = executor.runner, executor.view
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
    arrays.true_rows = rows if arrays.keeps_rows else 0
    seal: StateSeal | None = getattr(state, SEAL, None)
    ids = np.asarray(state.input_ids[: state.n_tokens]) if seal is None else seal.tokens
    arrays.note_native(ids)
    if adopt_tokens(live, ids, foreign=seal is None) is None and live.n:
        if seal is not None and seal.logits is not None:
            live.put_logits(seal.logits)
        executor.keep_tail()
        logits = live.row.logits()
        arrays.requires_eval = logits is None
        if live.profile.needs_checkpoints:
            runner.checkpoints.checkpoint(None, None if logits is None else logits.copy())


def user_cache() -> Any:
    """`cache` of `Llama`."""

    def get(llm: Any) -> Any:
        """Upstream's whole-state cache, if one was set; a request finds it only without a prompt cache.

        Such a cache loads the state with the longest common prefix even where memory cannot be cut back to
        that prefix, which gives up what is live (llama_cpp/llama.py, Llama._create_completion).
        """
        return None if llm.requests.inside is not None and llm.slots.all else llm.user_cache

    def put(llm: Any, cache: Any) -> None:
        if cache is not None and llm.slots.all:
            logger.info("set_cache: the prompt cache serves in its place; prompt_cache=False uses it")
        llm.user_cache = cache

    return property(get, put)
