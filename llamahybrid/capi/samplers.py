"""Samplers of llama.cpp that `llama_cpp.Llama` has no arguments for: DRY, XTC, top-n-sigma and others.

`Samplers` says which of them a request wants; `insert` puts them into the chain that upstream made, at the
places of llama.cpp's default order (common/common.h, common_params_sampling). `TokenBias` is for biases.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaSampler

_ORDER = (
    *("logit-bias", "penalties", "dry", "grammar", "top-n-sigma"),
    *("top-k", "typical", "top-p", "min-p", "xtc"),
    *("temp", "temp-ext", "mirostat", "mirostat-v2", "greedy", "dist"),
)
"""Names of samplers (src/llama-sampler.cpp), in the order of a chain."""

_BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])
"""llama_logit_bias (include/llama.h)."""


class TokenBias:
    """Numbers that the library adds to logits, behind all processors of the list that it is in."""

    def __init__(self, tokens: Sequence[int] | npt.NDArray[Any], bias: Any, first: int | None = None) -> None:
        """`bias`: one number, or one for each token; `first`: tokens of an answer that have it; None: all."""
        self.first, self._prompt = first, sys.maxsize
        self._entries = np.zeros(len(tokens), _BIAS)
        most = np.finfo(np.float32).max  # infinity would bring back a token that a form forbids, as NaN
        self._entries["token"], self._entries["bias"] = tokens, np.minimum(bias, most)

    def __call__(self, ids: npt.NDArray[Any], scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """As a logits processor, for code of others that calls it; `first` counts from the first call."""
        self._prompt = min(self._prompt, len(ids))
        if self.first is not None and len(ids) - self._prompt >= self.first:
            return scores
        biased = np.array(scores)
        biased[self._entries["token"]] += self._entries["bias"]
        return biased

    def sampler(self, n_vocab: int) -> Any:
        """Return a sampler of the library that adds the numbers."""
        entries = ctypes.cast(self._entries.ctypes.data, llama_cpp.llama_logit_bias_p)
        return llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(self._entries), entries)


def taken_out(chain: Any, first: int) -> list[Any]:
    """Remove the samplers of a chain from an index on, and return them."""
    return [
        llama_cpp.llama_sampler_chain_remove(chain, first)
        for _ in range(first, llama_cpp.llama_sampler_chain_n(chain))
    ]


def drop(chain: Any, part: Any) -> None:
    """Remove a sampler from a chain, and free it."""
    for index in range(llama_cpp.llama_sampler_chain_n(chain)):
        found = llama_cpp.llama_sampler_chain_get(chain, index)
        if ctypes.addressof(found.contents) == ctypes.addressof(part.contents):
            llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(chain, index))
            return


@dataclass(frozen=True)
class Samplers:
    """Samplers beside those of `llama_cpp.Llama`; the defaults are llama-server's, and change nothing."""

    dry_multiplier: float = 0.0
    """0: no DRY sampler."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """Tokens, of the prompt too, that are searched for repetitions; -1: all of the context."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    """0: no XTC sampler."""
    xtc_threshold: float = 0.1
    top_n_sigma: float = -1.0
    """0 or less: no top-n-sigma sampler."""
    dynatemp_range: float = 0.0
    """The temperature varies by so much with the entropy of the next token; 0: not at all."""
    dynatemp_exponent: float = 1.0
    repeat_last_n: int | None = None
    """Tokens of the answer that upstream's penalties count; -1: all; None: as upstream, 64."""
    repetition_penalty: float = 1.0
    """vLLM's: divides the logits of all tokens of the prompt and the answer."""
    prompt: tuple[int, ...] = ()
    """Token ids that DRY and the repetition penalty count before the answer."""

    def after(self, prompt: Sequence[int]) -> Samplers:
        """The same, for an answer to this prompt."""
        return replace(self, prompt=tuple(int(token) for token in prompt))

    def require_together(self, temperature: float, mirostat_mode: int) -> None:
        """Raise ValueError for samplers that would have no effect beside these arguments of upstream's."""
        dynamic = self.dynatemp_range > 0
        if dynamic and not temperature > 0:
            raise ValueError("dynatemp_range needs a temperature above 0")
        if (
            mirostat_mode
            and temperature > 0
            and (dynamic or self.xtc_probability > 0 or self.top_n_sigma > 0)
        ):
            raise ValueError("mirostat cannot be combined with xtc, top_n_sigma or dynatemp")


def insert(llm: Any, sampler: LlamaSampler, more: Samplers, asked: Mapping[str, Any]) -> None:
    """Put further samplers into the chain that `Llama._init_sampler(**asked)` made."""
    chain = sampler.sampler
    parts = [(_name(part), part) for part in taken_out(chain, len(sampler.custom_samplers))]
    for name, part in _made(llm, more, asked):
        if name in ("penalties of the answer", "temp-ext"):
            taken = "penalties" if name == "penalties of the answer" else "temp"
            for old in [each for each in parts if each[0] == taken]:
                parts.remove(old)
                llama_cpp.llama_sampler_free(old[1])
        parts.append((_name(part), part))
    for _, part in sorted(parts, key=lambda named: _ORDER.index(named[0])):
        llama_cpp.llama_sampler_chain_add(chain, part)


def _name(part: Any) -> str:
    name: str = llama_cpp.llama_sampler_name(part).decode()
    return name.lstrip("+?")  # marks of its state


def _made(llm: Any, more: Samplers, asked: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    n_ctx = llm.n_ctx()
    if more.repeat_last_n is not None:
        last = n_ctx if more.repeat_last_n < 0 else more.repeat_last_n
        names = {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        penalties = (asked.get(name, default) for name, default in names.items())
        made = llama_cpp.llama_sampler_init_penalties(llm.n_vocab(), last, *penalties)
        yield "penalties of the answer", made
    if more.repetition_penalty != 1.0:
        made = llama_cpp.llama_sampler_init_penalties(llm.n_vocab(), n_ctx, more.repetition_penalty, 0.0, 0.0)
        yield "penalties", _told(made, more.prompt)
    if more.dry_multiplier > 0:
        last = n_ctx if more.dry_penalty_last_n < 0 else more.dry_penalty_last_n
        breakers = [each.encode("utf-8") for each in more.dry_sequence_breakers]
        array = (ctypes.c_char_p * len(breakers))(*breakers)
        rates = more.dry_multiplier, more.dry_base, more.dry_allowed_length, last
        made = llama_cpp.llama_sampler_init_dry(llm._model.vocab, *rates, array, len(breakers))
        yield "dry", _told(made, more.prompt[-last:] if last else ())
    if more.top_n_sigma > 0:
        yield "top-n-sigma", llama_cpp.llama_sampler_init_top_n_sigma(more.top_n_sigma)
    if more.xtc_probability > 0:
        chance = more.xtc_probability, more.xtc_threshold
        yield "xtc", llama_cpp.llama_sampler_init_xtc(*chance, 0, llm._seed)
    temperature = asked.get("temp", 0.8)
    if more.dynatemp_range > 0 and temperature > 0:
        dynamic = more.dynatemp_range, more.dynatemp_exponent
        yield "temp-ext", llama_cpp.llama_sampler_init_temp_ext(temperature, *dynamic)


def _told(part: Any, tokens: Iterable[int]) -> Any:
    """The sampler, after these tokens."""
    for token in tokens:
        llama_cpp.llama_sampler_accept(part, token)
    return part
