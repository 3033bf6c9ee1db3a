"""The undocumented names of llama_cpp that llamahybrid uses, and a check of each.

A drop-in overrides methods that others call, sets fields of structures and reads attributes with a leading
underscore. ctypes accepts an unknown field silently, and an override that upstream no longer calls is silent,
too. `require` checks all names once when `llamahybrid.llama` is imported; `llamahybrid engine doctor` prints
the differences.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

from llamahybrid.errors import EngineError

logger = logging.getLogger("llamahybrid")

Look: TypeAlias = Callable[[Any], str]
"""Describes how an object differs, in words that follow its name; empty: it does not."""


def takes(*first: str, named: tuple[str, ...] = (), uses: tuple[str, ...] = ()) -> Look:
    """A function whose first parameters are these, in this order, and that has those `named` anywhere.

    `uses`: attributes that its code sets, reads or calls.
    """

    def look(function: Any) -> str:
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            return "is no function with a signature"
        missing = [name for name in named if name not in parameters]
        if tuple(parameters[: len(first)]) != first:
            return f"takes ({', '.join(parameters[: len(first)])}), expected ({', '.join(first)})"
        if missing:
            return f"does not take {', '.join(missing)}"
        code = getattr(inspect.unwrap(function), "__code__", None)
        unused = [name for name in uses if name not in getattr(code, "co_names", ())]
        return f"does not use {', '.join(unused)}" if unused else ""

    return look


def has_fields(**kinds: Any) -> Look:
    """A ctypes structure with these fields; a kind of None is not looked at."""

    def look(structure: Any) -> str:
        fields = {field[0]: field[1] for field in getattr(structure, "_fields_", ())}
        wrong = [n for n, kind in kinds.items() if n not in fields or (kind and fields[n] is not kind)]
        return f"has no {', '.join(wrong)} as llamahybrid knows it" if wrong else ""

    return look


def declared(arguments: int) -> Look:
    """A function of libllama that llama_cpp declares with this number of arguments."""

    def look(function: Any) -> str:
        if not hasattr(function, "errcheck"):
            return "is no ctypes function"
        found = len(function.argtypes or ())
        return "" if found == arguments else f"takes {found} arguments, expected {arguments}"

    return look


def is_a(kind: type) -> Look:
    """An object of this type."""
    return lambda value: "" if isinstance(value, kind) else f"is a {type(value).__name__}"


_u32, _i32, _bool = ctypes.c_uint32, ctypes.c_int32, ctypes.c_bool
_f32, _f64 = ctypes.c_float, ctypes.c_double
_SET_BY_INIT = (
    *("_ctx", "_model", "_logits_all", "_n_ctx", "_n_vocab", "_sampler", "_mirostat_mu", "_requires_eval"),
    *("_lora_adapter", "lora_scale", "input_ids", "scores", "n_tokens", "n_batch", "model_params"),
    *("context_params", "chat_handler", "draft_model", "cache"),
)
_LIBRARY = {
    **{"llama_set_adapters_lora": 4, "llama_set_adapter_cvec": 6, "llama_set_causal_attn": 2},
    **{"llama_set_warmup": 2, "llama_adapter_lora_init": 2, "llama_adapter_lora_free": 1},
    **{"llama_memory_clear": 2, "llama_memory_seq_cp": 5, "llama_memory_seq_rm": 4},
    **{"llama_memory_seq_pos_max": 2, "llama_memory_seq_pos_min": 2, "llama_n_ctx_seq": 1},
    **{"llama_state_seq_get_size_ext": 3, "llama_state_seq_get_data_ext": 5},
    **{"llama_state_seq_set_data_ext": 5, "llama_perf_context": 1},
    **{"llama_get_logits": 1, "llama_get_logits_ith": 2},
}
"""Functions of libllama with the number of their arguments."""

REQUIRED: Mapping[str, Look] = {
    "llama:Llama.__init__": takes(uses=_SET_BY_INIT),
    "llama:Llama.eval": takes("self", "tokens"),
    "llama:Llama.generate": takes("self", "tokens", named=("reset",)),
    "llama:Llama._input_ids": is_a(property),
    "llama:Llama._scores": is_a(property),
    "llama:Llama._create_completion": takes(
        "self", "prompt", named=("stopping_criteria", "logprobs"), uses=("generate",)
    ),
    "llama:Llama.create_completion": takes(uses=("_create_completion",)),
    "llama:Llama.reset": takes("self"),
    "llama:Llama.close": takes("self"),
    "llama:Llama.load_state": takes("self", "state"),
    "_internals:LlamaContext.__init__": takes(uses=("ctx", "memory", "model")),
    "_internals:LlamaContext.decode": takes("self", "batch", uses=("batch", "llama_decode")),
    "_internals:LlamaContext.kv_cache_clear": takes("self"),
    "_internals:LlamaContext.kv_cache_seq_rm": takes("self", "seq_id", "p0", "p1"),
    "_internals:LlamaContext.kv_cache_seq_cp": takes("self", "seq_id_src", "seq_id_dst", "p0", "p1"),
    "_internals:LlamaContext.kv_cache_seq_keep": takes("self", "seq_id"),
    "_internals:LlamaContext.kv_cache_seq_shift": takes("self", "seq_id", "p0", "p1", "shift"),
    "_internals:LlamaModel.__init__": takes(uses=("model", "vocab")),
    "llama_cpp:llama_batch": has_fields(
        n_tokens=_i32, token=None, embd=None, pos=None, n_seq_id=None, seq_id=None, logits=None
    ),
    "llama_cpp:llama_context_params": has_fields(
        swa_full=_bool, n_batch=_u32, n_ubatch=_u32, n_threads=_i32, n_threads_batch=_i32
    ),
    "llama_cpp:llama_model_params": has_fields(
        n_gpu_layers=_i32, load_mode=None, tensor_split=None, kv_overrides=None
    ),
    "llama_cpp:llama_perf_context_data": has_fields(
        n_p_eval=_i32, n_eval=_i32, t_p_eval_ms=_f64, t_eval_ms=_f64
    ),
    "llama_cpp:LLAMA_LOAD_MODE_NONE": is_a(int),
    "llama_cpp:LLAMA_LOAD_MODE_MLOCK": is_a(int),
    "llama_cpp:_lib": is_a(ctypes.CDLL),
    **{f"llama_cpp:{name}": declared(arguments) for name, arguments in _LIBRARY.items()},
}
"""Names without which answers could be wrong, or nothing works: the path of each, a module below llama_cpp
and the name in it."""

FEATURES: Mapping[str, Mapping[str, Look]] = {
    "n_parallel": {
        "llama:Llama.sample": takes(uses=("_sampler", "_ctx", "_init_sampler")),
        "llama:Llama._init_sampler": takes(uses=("_seed",)),
        "_internals:LlamaSampler.sample": takes("self", "ctx", "idx", uses=("sampler",)),
        "llama_cpp:llama_context_params": has_fields(n_ctx=_u32, flash_attn_type=None),
        "llama_cpp:llama_token_data": has_fields(id=_i32, logit=_f32, p=_f32),
        "llama_cpp:llama_token_data_array": has_fields(data=None, size=None, selected=None, sorted=_bool),
        "llama_cpp:llama_sampler_apply": declared(2),
        "llama_cpp:llama_sampler_accept": declared(2),
    },
    "`logprobs` of streams": {"llama:Llama.logits_to_logprobs": takes("logits")},
    "save_state, load_state": {
        "llama:Llama.save_state": takes("self"),
        "llama:LlamaState.__init__": takes(
            "self", "input_ids", "scores", "n_tokens", "llama_state", "llama_state_size"
        ),
    },
    "pickling": {"llama:Llama.__getstate__": takes("self")},
    "warm": {"llama:Llama.tokenize": takes("self", "text", named=("special",))},
    "reports": {"_internals:LlamaModel.detokenize": takes("self", "tokens", "special")},
    "noticing what others do to a context": {"_internals:LlamaContext.reset_timings": takes("self")},
    "paging": {"llama_cpp:llama_context_params": has_fields(n_seq_max=_u32, kv_unified=_bool)},
    "draft_planes": {
        "llama_cpp:llama_context_params": has_fields(n_rs_seq=_u32),
        "llama_cpp:llama_n_rs_seq": declared(1),
    },
    "stops inside a batch": {"llama_cpp:llama_set_abort_callback": declared(3)},
    "choosing the patched engine (set LLAMA_CPP_LIB_PATH)": {
        "_ctypes_extensions:load_shared_library": takes("lib_base_name", "base_path")
    },
}
"""Names of each feature that is off, or limited, without one of them."""

OPTIONAL = (
    "llama_n_rs_seq",
    "llama_set_abort_callback",
    "llama_state_seq_get_data_range",
)
"""Functions that llamahybrid uses and not every libllama has: rollback planes, stops inside a decode, and the
patched engine's attention of a range."""


@dataclass(frozen=True)
class Difference:
    """A name of llama_cpp that is not what llamahybrid knows."""

    name: str
    text: str
    feature: str
    """The feature that depends on it; empty: all do."""

    def __str__(self) -> str:
        return f"{self.name} {self.text}" + (f" ({self.feature})" if self.feature else "")


def differences() -> Iterator[Difference]:
    """Look at every name; imports llama_cpp."""
    for feature, names in {"": REQUIRED, **FEATURES}.items():
        for path, look in names.items():
            module, _, name = path.partition(":")
            try:
                value: Any = import_module(f"llama_cpp.{module}")
                for part in name.split("."):
                    read = inspect.getattr_static if inspect.isclass(value) else getattr
                    value = read(value, part)
            except (ImportError, AttributeError):
                text = "is not there"
            else:
                text = "" if _wrapped_by_others(value) else look(value)
            if text:
                yield Difference(name, text, feature)


def _wrapped_by_others(value: Any) -> bool:
    """A function that a monitor, say, has put in place of llama_cpp's: nothing can be told by its looks."""
    return inspect.isfunction(value) and not str(value.__module__).startswith("llama_cpp")


@cache
def require() -> None:
    """Say once, in one line, what is different.

    Raises:
        EngineError: answers could be wrong with this llama-cpp-python.
    """
    found = list(differences())
    if not found:
        return
    version = getattr(import_module("llama_cpp"), "__version__", "of unknown version")
    said = f"llama-cpp-python {version} is not as llamahybrid knows it: {'; '.join(map(str, found))}"
    if not all(difference.feature for difference in found):
        raise EngineError(f"{said}; install llama-cpp-python 0.3.36, or a newer llamahybrid")
    logger.warning("%s; these do less, or nothing", said)
