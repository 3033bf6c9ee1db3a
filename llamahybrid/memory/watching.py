"""Watch calls of llama_cpp's functions on our contexts.

An `errcheck` on llama_cpp's function objects sees the calls of all code in the process, which shares these
objects. Calls by other ways (another library handle, an extension module) are not seen.
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
