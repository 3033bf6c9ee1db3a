"""What is put on a context beside its model (LoRA, control vectors, modes), noticed as it is done.

There are no getters for it in llama.h, so the calls are watched. Those by ways that `watching` does not see
are what `Llama.cache_salt` is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash
from llama_cpp import llama_cpp as native

from llamahybrid.engine.content import Nameless, Signature, digest
from llamahybrid.memory.watching import address, context_at, contexts, watch

if TYPE_CHECKING:
    from llamahybrid.memory.context import GuardedContext

logger = logging.getLogger("llamahybrid")

MODES = ("llama_set_causal_attn", "llama_set_warmup")
"""Setters of what changes numbers; `llama_set_warmup` makes a mixture of experts use all of them."""

STATE_LOADERS = (
    "llama_set_state_data",
    "llama_load_session_file",
    "llama_state_set_data",
    "llama_state_load_file",
    "llama_state_seq_set_data",
    "llama_state_seq_set_data_ext",
    "llama_state_seq_load_file",
)
"""Functions that put another state into memory. Our own calls go by `capi.shim`, which nobody watches."""


@dataclass(frozen=True)
class Adapters:
    """What is on a context."""

    loras: tuple[tuple[bytes, float], ...] = ()
    """(16 bytes that name the content, scale) of each, ascending."""
    control: bytes = b""
    """Names a control vector and its layers; empty: there is none."""
    modes: tuple[tuple[str, bool], ...] = ()
    """What was last set, by setter, ascending; what nobody has set is left out."""

    @property
    def nameless(self) -> bool:
        """Something of it cannot be told by its content."""
        return any(isinstance(name, Nameless) for name in (self.control, *(name for name, _ in self.loras)))

    def digest(self) -> bytes:
        """Bytes that name all of it; none where there is nothing."""
        if not (self.loras or self.control or self.modes):
            return b""
        return xxhash.xxh3_128_digest(repr(self).encode())


class _Loaded:
    """A LoRA adapter in memory, by the file it came from."""

    def __init__(self, path: Path | None) -> None:
        self._name = b""
        self._path = path
        self._signature: Signature | None = None
        with contextlib.suppress(OSError):
            self._signature = None if path is None else Signature.of(path)

    @property
    def name(self) -> bytes:
        """16 bytes that name its content; `Nameless` where that cannot be told."""
        if not self._name:
            self._name = Nameless()
            with contextlib.suppress(OSError):
                if self._path is not None and Signature.of(self._path) == self._signature:
                    self._name = digest(self._path)
        return self._name


Change: TypeAlias = "Callable[[Any, Any, Adapters, GuardedContext], Adapters]"
"""Arguments, result, what was on the context, the context: what is on it now."""

_loaded: dict[int, _Loaded] = {}  # by address


def follow(context: GuardedContext, adapter: Any = None, scale: float = 0.0) -> Adapters:
    """From now on `context.adapt` is called whenever something is put on it; what is on it now.

    `adapter`: the llama_adapter_lora * that it was made with, at `scale`.
    """
    contexts[address(context.ctx)] = context
    return Adapters(((_lora(adapter), ctypes.c_float(scale).value),) if adapter and scale else ())


def _lora(adapter: Any) -> bytes:
    return _loaded.setdefault(address(adapter), _Loaded(None)).name


# -- what the calls mean ------------------------------------------------------------------------


def _set_loras(arguments: Any, result: int, before: Adapters, context: GuardedContext) -> Adapters:
    _, adapters, count, scales = arguments
    count = int(getattr(count, "value", count))
    found = [(adapters[i], float(scales[i])) for i in range(count)]
    return replace(before, loras=tuple(sorted((_lora(a), scale) for a, scale in found if scale)))


def _set_control(arguments: Any, result: int, before: Adapters, context: GuardedContext) -> Adapters:
    data, (size, width, first, last) = arguments[1], (int(getattr(n, "value", n)) for n in arguments[2:])
    if not address(data):
        return replace(before, control=b"")
    layers = range(max(1, first), min(last, native.llama_model_n_layer(context.model.model) - 1) + 1)
    if result or size < width * (layers.stop - 1):
        raise ValueError("what an earlier control vector left behind counts, too")
    row = ctypes.sizeof(ctypes.c_float) * width
    numbers = ctypes.string_at(address(data) + row * (layers.start - 1), row * len(layers))
    return replace(before, control=f"{layers}".encode() + xxhash.xxh3_128_digest(numbers))


def _set_mode(setter: str) -> Change:
    def change(arguments: Any, result: None, before: Adapters, context: GuardedContext) -> Adapters:
        value = bool(getattr(arguments[1], "value", arguments[1]))
        return replace(before, modes=tuple(sorted({**dict(before.modes), setter: value}.items())))

    return change


def _noticed(change: Change) -> Callable[[Any, Any], None]:
    def notice(result: Any, arguments: Any) -> None:
        context = context_at(arguments[0])
        if context is None:
            return
        try:
            context.adapt(change(arguments, result, context.adapters, context))
        except BaseException as error:  # whatever was handed over: the library has taken it
            context.adapt(replace(context.adapters, control=Nameless()))
            if not isinstance(error, Exception):
                raise
            logger.info("what was put on a context has no name (%s): nothing is reused across it", error)

    return notice


def _lora_loaded(result: Any, arguments: Any) -> None:
    if address(result):
        path = arguments[1]
        _loaded[address(result)] = _Loaded(Path(os.fsdecode(getattr(path, "value", path))).absolute())


def _lora_of_a_stream(result: Any, arguments: Any) -> None:
    _loaded[address(result)] = _Loaded(None)


def _lora_freed(result: Any, arguments: Any) -> None:
    _loaded.pop(address(arguments[0]), None)


def _state_loaded(result: Any, arguments: Any) -> None:
    """What is live is another state now, of as many tokens perhaps: neither positions nor counters tell."""
    context = context_at(arguments[0])
    if context is not None and context.live is not None:
        context.live.shared.lose_all()
    if context is not None and context.outside is not None:
        context.outside.forget()


for _loader in STATE_LOADERS:
    watch(_loader, _state_loaded)
watch("llama_adapter_lora_init", _lora_loaded)
watch("llama_adapter_lora_init_from_file_ptr", _lora_of_a_stream)
watch("llama_adapter_lora_free", _lora_freed)
watch("llama_set_adapters_lora", _noticed(_set_loras))
watch("llama_set_adapter_cvec", _noticed(_set_control))
for _setter in MODES:
    watch(_setter, _noticed(_set_mode(_setter)))
