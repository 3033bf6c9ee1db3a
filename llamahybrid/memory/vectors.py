"""Vectors: embeddings in a second context of a model that chats.

An embedding context marks every token as an output and clears its memory for each batch, so the context of
the chats is not used. The second one is made on first use, with the parameters of upstream's embedding
context (llama_cpp/llama.py, `Llama.__init__` and `Llama.embed`), and holds one batch.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._internals import LlamaBatch, LlamaContext, LlamaModel

from llamahybrid.capi.gguf import Gguf
from llamahybrid.engine import loaded
from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.context import GuardedContext

logger = logging.getLogger("llamahybrid")

FLOAT_BYTES = 4

WIDE_ROWS = "0024"
"""The patch without which llama.cpp ends the process where it reads rows wider than its embeddings."""


def embeds_only(model_path: str, options: Mapping[str, Any]) -> bool:
    """The model only embeds: its file names a pooling type, or its attention is not causal.

    `options`: upstream's arguments.
    """
    if options.get("attention_type") == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL:
        return True
    try:
        with Gguf(Path(model_path)) as gguf:
            architecture = gguf.read("general.architecture").get("general.architecture", "")
            pooling = gguf.read(f"{architecture}.pooling_type")
            causal = gguf.read(f"{architecture}.attention.causal")
    except OSError:  # upstream reports it
        return False
    return any(pooling.values()) or not all(causal.values())


class Vectors:
    """Embeds tokens, batch by batch; not for concurrent use."""

    def __init__(
        self, chats: LlamaContext, params: Any, n_batch: int, flash: bool, lora: tuple[Any, float], watch: Any
    ) -> None:
        """`chats`: the context of the chats, made with `params`; `lora`: its adapter and scale.

        `n_batch`: tokens of a batch, and of the longest text. `flash`: use flash attention.
        """
        self.n_batch = n_batch
        self.pooling: int = chats.pooling_type()
        self._model: LlamaModel = chats.model
        self._chats = chats
        self._changes = chats.changes if isinstance(chats, GuardedContext) else 0
        self._lora = lora
        self._watch = watch
        self._params = self._params_of(params, flash)
        self._context: GuardedContext | None = None
        self._batch: LlamaBatch | None = None

    def _params_of(self, params: Any, flash: bool) -> Any:
        """Return upstream's parameters of an embedding context, with one sequence for recurrent memory."""
        made = llama_cpp.llama_context_params.from_buffer_copy(params)
        native = self._model.model
        recurrent = llama_cpp.llama_model_is_recurrent(native) or llama_cpp.llama_model_is_hybrid(native)
        most = 1 if recurrent else llama_cpp.llama_max_parallel_sequences()
        n_ctx = llama_cpp.llama_n_ctx_seq(self._chats.ctx)
        made.n_ctx = n_ctx if n_ctx > _trained_ctx(self._model) else self.n_batch
        made.n_batch = self.n_batch
        # The library pools each native batch by itself (src/llama-graph.cpp, build_pooling).
        made.n_ubatch = self.n_batch if self.pooling else min(self.n_batch, params.n_ubatch)
        made.n_seq_max, made.kv_unified, made.n_rs_seq = min(self.n_batch, most), True, 0
        made.embeddings = True
        on, off = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        made.flash_attn_type = on if flash else off
        return made

    def batches(self, texts: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Pack texts into batches, as upstream does; without pooling, one by one."""
        batch: list[Sequence[int]] = []
        most = self._params.n_seq_max if self.pooling else 1
        for tokens in texts:
            if batch and (len(batch) >= most or sum(map(len, batch)) + len(tokens) > self.n_batch):
                yield batch
                batch = []
            batch.append(tokens)
        if batch:
            yield batch

    def embed(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        """Return the vectors of the texts of one batch: one each, or without pooling one for each token.

        Raises LlamaHybridError where adapters or modes of the chats' context were changed since it was
        opened; ValueError for a text without tokens; DecodeError, DeviceLost.
        """
        if isinstance(self._chats, GuardedContext) and self._chats.changes != self._changes:
            raise LlamaHybridError(
                "adapters and modes set after this model was opened do not apply to its embeddings: open it "
                "with lora_path, or with prompt_cache=False"
            )
        if not all(map(len, texts)):
            if not self.pooling:
                return [[] for _ in texts]  # the only text of its batch
            raise ValueError("there is nothing to embed: a text has no tokens")
        context, batch = self._made()
        batch.reset()
        for number, tokens in enumerate(texts):
            batch.add_sequence(tokens, number, True)
        try:
            context.decode(batch)
            return self._read(context, texts)
        finally:
            context.kv_cache_clear()

    def _read(self, context: GuardedContext, texts: Sequence[Sequence[int]]) -> list[Any]:
        width = self._model.n_embd()
        if not self.pooling:
            rows = np.ctypeslib.as_array(context.get_embeddings(), (len(texts[0]), width))
            return [rows.tolist()]
        if self.pooling == llama_cpp.LLAMA_POOLING_TYPE_RANK:
            width = min(width, llama_cpp.llama_model_n_cls_out(self._model.model))
        found = (context.get_embeddings_seq(number) for number in range(len(texts)))
        return [np.ctypeslib.as_array(vector, (width,)).tolist() for vector in found]

    def _made(self) -> tuple[GuardedContext, LlamaBatch]:
        """Return the context, which is freed with its model, and the batch."""
        if self._context is None or self._batch is None:
            wide = llama_cpp.llama_model_n_embd_out(self._model.model) > self._model.n_embd()
            if wide and WIDE_ROWS not in loaded.patches():
                raise LlamaHybridError(
                    "llama.cpp would end the process: of this architecture, it embeds with the patches of "
                    "`llamahybrid engine build --hardening` only"
                )
            try:
                made = LlamaContext(model=self._model, params=self._params, verbose=False)
            except ValueError as error:
                raise LlamaHybridError(
                    f"no context for embeddings of {self.n_batch} tokens could be made beside the chats: "
                    "a smaller n_batch takes less memory"
                ) from error
            adapter, scale = self._lora
            if adapter:
                adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
                if llama_cpp.llama_set_adapters_lora(made.ctx, adapters, 1, (ctypes.c_float * 1)(scale)):
                    raise LlamaHybridError("the LoRA adapter of the model cannot be put on its embeddings")
            self._batch = LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=1, verbose=False)
            self._context = GuardedContext.guard(made)
            self._context.watch = self._watch
            logger.info(
                "embeddings beside chats: a context of their own for %d tokens, with outputs of %d MiB",
                self.n_batch,
                2 * FLOAT_BYTES * (self._model.n_vocab() + self._model.n_embd()) * self.n_batch >> 20,
            )
        return self._context, self._batch


def _trained_ctx(model: LlamaModel) -> int:
    """Return the context size above which RoPE factors change (src/llama-model.cpp, get_rope_factors)."""
    known = model.metadata()
    name = f"{known.get('general.architecture')}.rope.scaling.original_context_length"
    return int(known.get(name, model.n_ctx_train()))
