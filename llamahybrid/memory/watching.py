"""Calls of llama_cpp's functions, watched as they are made, and the contexts of ours that they are of.

By an `errcheck` on llama_cpp's function objects, which everyone in the process shares, however they imported
them. Calls by other ways (a library handle of one's own, an extension module) are not seen.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from llama_cpp import llama_cpp as native

logger = logging.getLogger("llamahybrid")

Notice: TypeAlias = Callable[[Any, Any], Any]
"""Result and arguments of a call -> what it is to return in place of its result; None: that."""

contexts: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Ours (`GuardedContext`), by address."""


def address(pointer: Any) -> int:
    """The address in whatever ctypes takes for a pointer."""
    if pointer is None or isinstance(pointer, int):
        return pointer or 0
    pointer = getattr(pointer, "_obj", pointer)  # of a byref()
    if isinstance(pointer, ctypes.c_void_p):
        return pointer.value or 0
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def context_at(pointer: Any) -> Any:
    """The open context of ours that a `llama_context *` points at; None: it is none of ours."""
    context = contexts.get(address(pointer))
    return context if context is not None and address(context.ctx) == address(pointer) else None


def context_of_memory(pointer: Any) -> Any:
    """The open context of ours whose memory this is; None: it is of none."""
    wanted = address(pointer)
    for context in list(contexts.values()):
        if context.ctx is not None and wanted and address(context.memory) == wanted:
            return context
    return None


def watch(name: str, notice: Notice) -> None:
    """Have `notice` called behind every call of a function of llama_cpp, with its result and arguments."""
    function: Any = getattr(native, name, None)
    if not hasattr(function, "errcheck"):
        return  # an old name that this release has no more
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
