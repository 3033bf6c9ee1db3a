"""Fingerprints: the model, engine, parameters and adapters that a state is valid for.

All fields of the two structs of parameters count except `WITHOUT_EFFECT`, so that a field of a later
llama.cpp counts until it has been examined. Layers, devices and offloading count: each backend rounds
differently in every step. The number of threads and the batch size do not: both vary within one context, and
change the last bits only.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import llama_cpp
import xxhash

from llamahybrid.devices import ggml
from llamahybrid.devices.offload import identities
from llamahybrid.engine.content import Nameless
from llamahybrid.engine.loaded import engine_digest
from llamahybrid.errors import DeviceError
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.paging import Pager
from llamahybrid.memory.segment import Splitter
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import HERE_ONLY

FORMAT = b"llamahybrid identity 2"

WITHOUT_EFFECT = frozenset(
    {
        # of the model: how it gets into memory
        *("load_mode", "lazy_mode", "check_tensors", "vocab_only"),
        *("progress_callback", "progress_callback_user_data"),
        # of the context: batches and threads (n_ubatch is in: sliding windows get room by it)
        *("n_batch", "n_threads", "n_threads_batch", "n_outputs_max", "n_outputs_max_per_seq"),
        "n_rs_seq",  # rollback planes: states move between any numbers of them
        *("no_perf", "abort_callback", "abort_callback_data", "cb_eval_user_data"),
        *("samplers", "n_samplers"),  # behind the logits
    }
)
"""Fields that change neither numbers nor the layout of states."""

ALWAYS = "LLAMA_ATTN_ROT_DISABLE"
ENVIRONMENT = re.compile(r"GGML_(?!NO_BACKTRACE$).*|NVIDIA_TF32_OVERRIDE")
"""Environment variables that change states (src/llama-kv-cache.cpp, its constructor) or a backend's numbers
(GGML_CPU_TILED_MM, GGML_VK_DISABLE_F16, ...), unexamined ones included."""


def parameters(model: Any, context: Any) -> bytes:
    """Return 16 bytes that name the effect of a llama_model_params and a llama_context_params."""
    hasher = xxhash.xxh3_128()
    for params in (model, context):
        for name, kind in params._fields_:
            if name not in WITHOUT_EFFECT:
                hasher.update(f"{name}={_value(name, kind, getattr(params, name))!r};".encode())
    for name in sorted({ALWAYS, *filter(ENVIRONMENT.fullmatch, os.environ)}):
        hasher.update(f"{name}={os.environ.get(name)!r};".encode())
    return hasher.digest()


def _value(name: str, kind: Any, value: Any) -> object:
    if name == "tensor_split":
        return value[: llama_cpp.LLAMA_MAX_DEVICES] if value else None
    if name == "kv_overrides":
        return sorted(_overrides(value)) if value else []
    if name == "devices" and (found := identities(value) if value else _own_devices()) is not None:
        return found
    if issubclass(kind, ctypes._SimpleCData) and kind is not ctypes.c_void_p:
        return value
    return Nameless() if value else None  # a pointer (cb_eval, ...) has no name


def _own_devices() -> list[str] | Nameless | None:
    """Return llama.cpp's default devices, the visible GPUs of this machine; None for none."""
    try:
        return [device.identity for device in ggml.local()] or None
    except (DeviceError, AttributeError):  # unknown
        return Nameless()


def _overrides(array: Any) -> Iterator[bytes]:
    """Yield key, type and value of each override; the array is zero elsewhere and ends with an empty key."""
    at = 0
    while array[at].key:
        yield bytes(array[at])
        at += 1


@dataclass(frozen=True, eq=False)
class Computation:
    """The model, engine, parameters and adapters of one context."""

    model: ModelFiles
    settings: bytes
    """Engine and parameters: see `settings`."""
    adapters: bytes = b""
    """Adapters and modes of the context: the scale of the LoRA adapter it was made with, whose file is one of
    the model's files; `Nameless` after any later change (LoRA, control vectors, modes)."""
    salt: str = ""
    """`Llama.cache_salt`."""
    together: bool = False
    """Tokens of several requests share batches, which changes the last bits: states of such a context are not
    used where exact bits are promised."""

    @cached_property
    def nameless(self) -> bool:
        """No other context or process can verify that it computes the same."""
        return any(isinstance(n, Nameless) for n in (self.settings, self.adapters, self.model.name))

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes for use within this process, or in any process if the model is read `by_content`."""
        return self._fingerprint(self.model.name)

    def portable(self) -> bytes:
        """Return 16 bytes for use in any process; reads the model's files if they were not read yet."""
        return self._fingerprint(self.model.content())

    def _fingerprint(self, model: bytes) -> bytes:
        hasher = xxhash.xxh3_128(FORMAT)
        for part in (
            model,
            self.settings,
            self.adapters,
            self.salt.encode("utf-8", "surrogatepass"),
            *([b"together"] if self.together else []),
        ):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()


def with_salt(fingerprint: bytes, salt: bytes) -> bytes:
    """Return the fingerprint for requests of a salt, given by its digest (`client.salt.digest`)."""
    return hashlib.blake2b(fingerprint, digest_size=16, key=salt).digest() if salt else fingerprint


def salt_tag(salt: bytes) -> str:
    """Return a salt as part of a namespace; empty for the shared default."""
    return b64encode(salt, altchars=b"._").decode().rstrip("=")


def settings(model: Any, context: Any) -> bytes:
    """Return 16 bytes that name engine and parameters; `Nameless` if one of them has no stable content."""
    name = parameters(model, context)
    if name != parameters(model, context):
        return Nameless()
    try:
        return xxhash.xxh3_128_digest(engine_digest() + name)
    except OSError:
        return Nameless()


class Identity:
    """The name under which states of one sequence are stored."""

    def __init__(self, computation: Computation, state: SequenceState, pager: Pager | None) -> None:
        self.computation = computation
        """The model, engine and parameters."""
        self.salt = b""
        """Digest of the salt of its requests; empty: the shared default."""
        self._state = state
        self.splitter = None if pager is None else Splitter(pager.layout)
        """Splits stored attention of this layout."""
        self._rename(computation.fingerprint)

    def _rename(self, unsalted: bytes) -> None:
        self._unsalted = unsalted
        self.fingerprint = with_salt(unsalted, self.salt)
        """Compared with `is`: each change brings another object."""

    @property
    def namespace(self) -> str:
        """The fingerprint in the prompt cache and in sealed states."""
        return self.namespace_of(self.salt)

    def namespace_of(self, salt: bytes) -> str:
        """Return the namespace for requests of a salt: the computation, then the salt."""
        name = self._unsalted.hex() + (f"+{salt_tag(salt)}" if salt else "")
        return name + (HERE_ONLY if self.computation.nameless else "")

    def serves(self, salt: bytes) -> bool:
        """The sequence belongs to requests of this salt, and its name says so."""
        return self.salt == salt and self.fingerprint == with_salt(self._unsalted, salt)

    def serve(self, salt: bytes) -> None:
        """Change the salt of the next requests. Raises ValueError with live tokens."""
        if self._state.n:
            raise ValueError("the live tokens belong to requests of another salt")
        self.salt = salt
        self._rename(self._unsalted)
        while self.computation.fingerprint != self._unsalted:
            self._rename(self.computation.fingerprint)  # changed by another thread

    def computed_by(self, computation: Computation) -> None:
        """Change the computation: live tokens may be continued, but are never stored.

        Safe beside a thread that decodes: its stored states have the old name, or an unknown first token.
        """
        self.computation = computation
        if computation.fingerprint == self._unsalted:
            return
        self._state.disown()
        self._rename(computation.fingerprint)

    def verify_model(self) -> None:
        """Change the computation if a mapped model file was written to."""
        if self.computation.model.edited():
            self.computed_by(replace(self.computation))
