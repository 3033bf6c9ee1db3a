"""Tokens decoded by a context, as llama.cpp itself counts them."""

from __future__ import annotations

import llama_cpp


def _decoded_since_creation(llm: llama_cpp.Llama) -> int:
    """All tokens this context ever decoded.

    `llama_perf_context` reads max(1, n) for both counters (src/llama-context.cpp, perf_get_data), so a 1 may
    be a 0: the time spent tells them apart, because it is exactly zero until something was counted.
    """
    context = llm._ctx.ctx
    llama_cpp.llama_synchronize(context)
    perf = llama_cpp.llama_perf_context(context)
    prompt = int(perf.n_p_eval) if perf.t_p_eval_ms > 0 else 0
    single = int(perf.n_eval) if perf.t_eval_ms > 0 else 0
    return prompt + single


class DecodeCounter:
    """Tokens that `llm` decoded natively since this counter was made or last asked.

    Every token of every `llama_decode` counts, whoever asked for it; failed batches count too.
    Nothing is reset, so counters do not disturb each other.

    Raises:
        ValueError: if `llm` is verbose (upstream then resets the counters in each completion)
            or was made with `no_perf=True` (then there is no time to tell 0 from 1 by).
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        if llm.verbose or llm.context_params.no_perf:
            raise ValueError("decoded tokens can only be counted with verbose=False and no_perf=False")
        self._llm = llm
        self._last = _decoded_since_creation(llm)

    def take(self) -> int:
        """Tokens decoded since the counter was made or last taken."""
        now = _decoded_since_creation(self._llm)
        taken, self._last = now - self._last, now
        return taken
