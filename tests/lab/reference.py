"""Fresh contexts of plain llama_cpp to compare a `Llama` with, in the settings that shape state."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from llamahybrid.capi.gguf import Gguf
from llamahybrid.harness.targets.reference import difference as difference
from llamahybrid.llama import Llama
from tests.lab.history import Vocabulary

# isort: split
import llama_cpp
from llama_cpp import _internals

Logits: TypeAlias = npt.NDArray[np.float32]
Factory: TypeAlias = Callable[..., Any]
"""`llama_cpp.Llama` or anything that takes its arguments."""


LAYERS = "LLAMAHYBRID_TEST_LAYERS"
"""Layers that go to a GPU, of the subject and of what it is compared with; -1: all."""
GPU_TOLERANCE = 4e-2
"""On a GPU all products of matrices depend on the batch: cold runs lie up to 2e-2 apart (plamo2, H100)."""


@dataclass(frozen=True)
class Setting:
    """Arguments for both sides, and how far their logits may lie apart as a share of the logits' range."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-3
    batch_sensitive: bool = False
    """Logits depend on where batches are cut by more than rounding."""

    def __post_init__(self) -> None:
        if os.environ.get(LAYERS):
            object.__setattr__(self, "tolerance", max(self.tolerance, GPU_TOLERANCE))
            object.__setattr__(self, "batch_sensitive", True)

    def open(self, factory: Factory, model: Path, **more: Any) -> Any:
        """A `Llama` of that class on `model`: 512 tokens of context and one thread, if not set otherwise."""
        base = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 1}
        return factory(str(model), **{**base, **_place(factory), **self.arguments, **more})


RPC = "LLAMAHYBRID_TEST_RPC"
"""RPC servers that hold all layers of the subject; what it is compared with stays on this machine."""


def _place(factory: Factory) -> dict[str, Any]:
    place: dict[str, Any] = {}
    if layers := os.environ.get(LAYERS):
        place |= {"n_gpu_layers": int(layers), "flash_attn": True}  # our default there
    if (servers := os.environ.get(RPC)) and isinstance(factory, type) and issubclass(factory, Llama):
        place |= {"rpc_servers": servers, "n_gpu_layers": -1, "flash_attn": False}
    return place


GGML_TYPE_Q8_0 = 8

# Flash attention on a CPU reduces in another order for each batch size: two cold stock runs with different
# cuts lie up to 5e-3 of the range apart, whatever is cached.
SETTINGS: tuple[Setting, ...] = (
    Setting("default"),
    # A windowed cache has room for window + n_ubatch tokens, padded to 256: more are needed to lose any.
    Setting("window", {"swa_full": False, "n_batch": 32, "n_ubatch": 32}),
    Setting("small batches", {"n_batch": 24}),
    Setting("odd context", {"n_ctx": 300}),
    Setting("all logits", {"logits_all": True}),
    Setting("flash attention", {"flash_attn": True}, tolerance=1e-2, batch_sensitive=True),
    Setting(
        "q8 cache",
        {"flash_attn": True, "type_k": GGML_TYPE_Q8_0, "type_v": GGML_TYPE_Q8_0},
        tolerance=1e-2,
        batch_sensitive=True,
    ),
)


OTHERS: Mapping[str, Sequence[Any]] = {
    "n_ctx": (256, 513),
    "n_batch": (7, 31, 64, 257),
    "n_ubatch": (5, 8, 32, 256),
    "swa_full": (True, False),
    "offload_kqv": (False,),
    "rope_freq_base": (5000.0, 1e6),
    "rope_freq_scale": (0.5,),
    "logits_all": (True,),
    "use_mmap": (False,),
}
"""Values of arguments that campaigns cross with the settings; none makes logits more sensitive."""


def crossed(setting: Setting, seed: int) -> Setting:
    """The setting with some more arguments, drawn from a seed."""
    rng = random.Random(f"arguments {seed}")
    more = {name: rng.choice(values) for name, values in OTHERS.items() if rng.random() < 0.2}
    return replace(setting, name=f"{setting.name} {more}", arguments={**more, **setting.arguments})


def settings_for(model: Path, settings: Sequence[Setting] = SETTINGS) -> tuple[Setting, ...]:
    """The settings in which `model` can be compared, of those given.

    A mixture of experts picks them by a threshold, so that a difference of 1e-3 may send a token to another
    expert and the logits anywhere: with batch-sensitive settings two right runs then have nothing in common.
    None is left on a GPU, and none of arwkv7, whose cold runs lie up to 12 % of the range apart there (H100).
    """
    with Gguf(model) as gguf:
        fields = gguf.read("")
    routed = any(key.endswith(".expert_count") and count for key, count in fields.items())
    amplifies = bool(os.environ.get(LAYERS)) and fields["general.architecture"] == "arwkv7"
    return tuple(each for each in settings if not (amplifies or (routed and each.batch_sensitive)))


class Reference:
    """Fresh stock contexts of one model."""

    def __init__(self, model: Path, setting: Setting) -> None:
        self._llama = setting.open(llama_cpp.Llama, model)
        # upstream's arrays are as long as the n_ctx asked for, the native context may be longer
        self.n_ctx: int = min(self._llama.n_ctx(), len(self._llama.input_ids))
        size = self._llama.n_vocab()
        vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        openers = tuple(t for t in range(size) if llama_cpp.llama_vocab_is_control(vocab, t))
        self.vocabulary = Vocabulary(size, openers)

    def logits(
        self,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        *,
        every: bool = False,
        cuts: Sequence[int] = (),
    ) -> Logits:
        """Logits at the prompt's end and after each token of `answer`, from a context made for this call.

        The prompt is decoded in batches of n_batch, also cut at `cuts`, the answer token by token. With
        `every` the rows of all prompt tokens come first. Shape
        (len(answer) + 1 [+ len(prompt) - 1], n_vocab).
        """
        llama = self._llama
        context = _internals.LlamaContext(model=llama._model, params=llama.context_params, verbose=False)
        adapter = llama._lora_adapter
        if adapter is not None:
            adapters, scales = (
                (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter),
                (ctypes.c_float * 1)(llama.lora_scale),
            )
            if llama_cpp.llama_set_adapters_lora(context.ctx, adapters, 1, scales):
                raise RuntimeError("the reference context refused the LoRA adapter")
        rows: list[Logits] = []
        try:
            step = llama.n_batch
            borders = sorted(
                {*range(0, len(prompt), step), *(c for c in cuts if 0 < c < len(prompt)), len(prompt)}
            )
            batches = [list(prompt[start:end]) for start, end in pairwise(borders)]
            done = 0
            for batch in [*batches, *([token] for token in answer)]:
                llama._batch.set_batch(batch=batch, n_past=done, logits_all=every)
                context.decode(llama._batch)
                done += len(batch)
                if every:
                    rows += [output_row(context.ctx, i, self.vocabulary.size) for i in range(len(batch))]
                elif done >= len(prompt):
                    rows.append(output_row(context.ctx, -1, self.vocabulary.size))
        finally:
            context.close()
        return np.stack(rows)

    def close(self) -> None:
        self._llama.close()


def output_row(ctx: Any, index: int, size: int) -> Logits:
    """A copy of the context's logits for one output of the last batch, shape (size,); -1: the last one."""
    return np.array(
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, index), (size,)), dtype=np.float32
    )
