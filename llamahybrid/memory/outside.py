"""Calls of llama_cpp's functions by other code, and the tokens that it decodes natively.

An `errcheck` on llama_cpp's function objects sees the calls of all code in the process, which shares these
objects. Calls by other ways (another library handle, an extension module) are not seen.

Programs like guidance track the tokens themselves: they cut with `llama_memory_seq_rm`, ignore its result,
and continue with `llama_decode`. Hybrid memory refuses such cuts, since a recurrent state cannot be cut, and
the next decode fails; a sliding window accepts cuts without the cells for them, and computes wrong logits
(seq_rm of src/llama-memory-hybrid.cpp, src/llama-kv-cache-iswa.cpp). Instead the tokens before the cut are
restored, from a checkpoint or by decoding them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from llama_cpp import llama_cpp as native

from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Tokens

logger = logging.getLogger("llamahybrid")

Notice: TypeAlias = Callable[[Any, Any], Any]
"""Maps result and arguments of a call to a new result; None keeps the result."""

contexts: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""All `GuardedContext`, by address."""


def address(pointer: Any) -> int:
    """Return the address in any value that ctypes accepts as a pointer."""
    if pointer is None or isinstance(pointer, int):
        return pointer or 0
    pointer = getattr(pointer, "_obj", pointer)  # of a byref()
    if isinstance(pointer, ctypes.c_void_p):
        return pointer.value or 0
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def context_at(pointer: Any) -> Any:
    """Return the open `GuardedContext` of a `llama_context *`; None for other contexts."""
    context = contexts.get(address(pointer))
    return context if context is not None and address(context.ctx) == address(pointer) else None


def context_of_memory(pointer: Any) -> Any:
    """Return the open `GuardedContext` that owns a memory; None for other memories."""
    wanted = address(pointer)
    for context in list(contexts.values()):
        if context.ctx is not None and wanted and address(context.memory) == wanted:
            return context
    return None


def watch(name: str, notice: Notice) -> None:
    """Call `notice` after every call of a function of llama_cpp, with its result and arguments."""
    function: Any = getattr(native, name, None)
    if not hasattr(function, "errcheck"):
        return  # an old name, missing in this release
    before = function.errcheck

    def check(result: Any, called: Any, arguments: Any) -> Any:
        try:
            instead = notice(result, arguments)
        except Exception:
            logger.exception("%s could not be followed", name)
        else:
            result = result if instead is None else instead
        return before(result, called, arguments) if before is not None else result

    function.errcheck = check


class OutsideTokens:
    """Tokens that other code decoded on sequence 0 since it was empty; none where they are unknown."""

    def __init__(self, live: LiveSequence, bring_back: Callable[[Tokens], bool]) -> None:
        """`bring_back` restores exactly these tokens; False where it cannot now."""
        self._live = live
        self._bring_back = bring_back
        self._tokens: list[int] = []
        self._first = 0
        """The lowest position in memory."""
        self._counters: object = None
        """Our own counters at that time; they change with our own operations."""

    @property
    def known(self) -> bool:
        """All tokens in memory are known."""
        return bool(self._tokens) and self._counters is self._live.shared.counters

    def forget(self) -> None:
        """Note a change of memory that is not tracked."""
        self._tokens = []

    def decoded(self, batch: Any) -> None:
        """Note a natively decoded batch."""
        found = _plain(batch)
        start = -1 if found is None else found[0]
        if start == 0:
            self._tokens = []
        elif not self.known or start != len(self._tokens):
            self.forget()
            return
        assert found is not None
        self._tokens += found[1]
        self._first = self._live.native.positions()[0]
        self._counters = self._live.shared.counters

    def removed(self, done: bool, seq: int, begin: int, end: int) -> bool | None:
        """Note a removal of [begin, end); True where it was not `done`, or not exactly, and now is."""
        n, begin = len(self._tokens), max(begin, 0)
        if seq > 0:
            return None
        if begin == 0 and end < 0:  # everything; hybrid memory refuses that for sequence -1
            if done:
                self.forget()
                return None
        elif not self.known or begin >= n:
            return None
        elif 0 <= end < n:
            if done:
                self.forget()
            return None
        elif done and begin >= self._live.profile.cut_floor(n, self._first):
            del self._tokens[begin:]
            return None
        kept = self._tokens[:begin]
        self.forget()
        if not self._bring_back(np.array(kept, dtype=np.int32)):
            return None
        self._tokens, self._counters = kept, self._live.shared.counters
        self._first = self._live.native.positions()[0]
        return True


def _plain(batch: Any) -> tuple[int, list[int]] | None:
    """Return first position and ids of a batch with one run of tokens of sequence 0; None for others."""
    n = int(batch.n_tokens)
    if n < 1 or not batch.token or not batch.pos:
        return None
    named = range(n if batch.n_seq_id and batch.seq_id else 0)
    if any(batch.n_seq_id[i] != 1 or batch.seq_id[i][0] != 0 for i in named):
        return None
    first = int(batch.pos[0])
    if batch.pos[:n] != list(range(first, first + n)):
        return None
    return first, batch.token[:n]


def _decoded(result: int, arguments: Any) -> None:
    context = context_at(arguments[0])
    if context is None or context.outside is None:
        return
    if result == 0:
        context.outside.decoded(arguments[1])
    elif result != -1:  # an invalid batch changes nothing
        context.outside.forget()


def _removed(result: bool, arguments: Any) -> bool | None:
    memory, *cut = arguments
    context = context_of_memory(memory)
    if context is None or context.outside is None:
        return None
    seq, begin, end = (int(getattr(number, "value", number)) for number in cut)
    removed: bool | None = context.outside.removed(bool(result), seq, begin, end)
    return removed


def _changed(result: Any, arguments: Any) -> None:
    context = context_of_memory(arguments[0])
    if context is not None and context.outside is not None:
        context.outside.forget()


watch("llama_decode", _decoded)
watch("llama_memory_seq_rm", _removed)
for _name in ("clear", "seq_add", "seq_cp", "seq_div", "seq_keep"):
    watch(f"llama_memory_{_name}", _changed)
