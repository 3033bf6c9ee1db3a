"""A model under test: contexts, clean runs for comparison, and properties.

Loads libllama when it is imported. Struct layouts are those that llama_cpp mirrors; functions are called at
their addresses in the library that llama_cpp has loaded.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from llama_cpp import llama_cpp as lib

from llamahybrid.devices.offload import Offload
from llamahybrid.devices.rpc import endpoints
from llamahybrid.harness.hazards.context import Context
from llamahybrid.harness.hazards.effect import Gap, Logits, NotApplicable, gap

_ERROR = 4  # ggml_log_level
_UNSHARED = (b"qwen4exp",)
"""Architectures that assert that each token is of one sequence (src/models/qwen4exp.cpp, set_input)."""

_GPU_SHARE = 1e-2
"""`Gap.share` on a GPU, whose products of matrices depend on the batch: 2.4e-3 measured on an H100."""

_MULTI_ROPE = (8, 40)  # LLAMA_ROPE_TYPE_MROPE, LLAMA_ROPE_TYPE_IMROPE


def _log(level: int, text: bytes, _: int | None) -> None:
    """Let errors through: the last one is part of the report when the process dies."""
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_log)


class ModelUnderTest:
    """A model under test and its properties."""

    def __init__(self, path: str, gpu_layers: int = 0, rpc: str = "") -> None:
        """`rpc`: servers that layers go to, as `Llama` takes them."""
        lib.llama_log_set(_LOG, None)
        lib.llama_backend_init()
        self.path = path
        self.on_gpu = gpu_layers != 0
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        self.offload = Offload(endpoints(rpc), watched=False)
        self.offload.ask_for(params)
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama_model_load_from_file made no model of {path}")
        self.words = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))

    def token(self, position: int, text: int = 0) -> int:
        """The token at a position of one of the test texts."""
        return (7 * position + 31 * text + 1) % min(self.words, 128)

    def context(self, **params: Any) -> Context:
        """A fresh context; keywords are fields of `llama_context_params`."""
        return Context(self, params)

    def gap(self, got: Logits, wanted: Logits) -> Gap:
        """Compare two rows of logits, shape (words,). Raises NotApplicable if the clean row is constant."""
        return gap(got, wanted, _GPU_SHARE) if self.on_gpu else gap(got, wanted)

    def clean(self, length: int, *, text: int = 0, alone: int = 0, **params: Any) -> Logits:
        """Logits at position `length` in a context that saw that text only, its last `alone` apart."""
        params.pop("cb_eval", None)
        context = self.context(**params).grown(length - alone, text=text)
        if context.feed(length - alone, length + 1, text=text, chunk=1):
            raise RuntimeError("a clean context refused to go on")
        return context.logits()

    def with_planes(self, count: int = 4, **params: Any) -> Context:
        """A context with `count` rollback planes; raises NotApplicable where the model has none."""
        context = self.context(n_rs_seq=count, **params)
        if lib.llama_n_rs_seq(context.ctx) != count:
            raise NotApplicable("the architecture has no rollback planes")
        return context

    def need(self, memory: str) -> None:
        """Raise NotApplicable unless the model has this memory: recurrent, attention, hybrid or window."""
        recurrent, hybrid = lib.llama_model_is_recurrent(self.model), lib.llama_model_is_hybrid(self.model)
        window = lib.llama_model_n_swa(self.model) > 0
        has = {
            "recurrent": recurrent or hybrid,
            "attention": not recurrent,
            "hybrid": hybrid,
            "window": window,
        }
        if not has[memory]:
            raise NotApplicable(f"the model has no {memory} memory")

    def need_memory_limit(self) -> None:
        """Raise NotApplicable where a GPU's driver ends the process that has no memory left."""
        if self.on_gpu:
            raise NotApplicable("on a GPU the driver fails first")

    def need_shared_tokens(self) -> None:
        """Raise NotApplicable where a token is of one sequence only."""
        name = ctypes.create_string_buffer(64)
        lib.llama_model_meta_val_str(self.model, b"general.architecture", name, len(name))
        if name.value in _UNSHARED:
            raise NotApplicable("a token of two sequences ends the process on purpose (GGML_ASSERT)")

    def need_multi_rope(self, yes: bool) -> None:
        """Raise NotApplicable unless positions are (`yes`) or are not M-RoPE's."""
        if (lib.llama_model_rope_type(self.model) in _MULTI_ROPE) != yes:
            raise NotApplicable(f"positions are {'not ' if yes else ''}M-RoPE's")
