"""Answers held against fresh contexts: each token must be what a context that reused nothing would choose.

The answer is fed to a context made for it, token by token, on llama.cpp's functions alone. A greedy choice
that lies under the best by no more than two right runs may differ is a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _internals

from llamahybrid.harness.report import Sameness
from llamahybrid.harness.targets.base import TOLERANCE

Row = npt.NDArray[np.float32]


def last_row(ctx: Any, n_vocab: int) -> Row | None:
    """A copy of the logits of the context's last output; None: there are none."""
    row = llama_cpp.llama_get_logits_ith(ctx, -1)
    return np.array(np.ctypeslib.as_array(row, (n_vocab,)), np.float32) if row else None


def difference(row: Row, reference: Row) -> float:
    """Largest distance over the reference's range; infinite where something is not finite."""
    if not (np.isfinite(row).all() and np.isfinite(reference).all()):
        return float("inf")
    return float(np.abs(row - reference).max() / (reference.max() - reference.min()))


def rows(llm: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[Row]:
    """Logits at the prompt's end and after each of the answer's tokens, from a context made for this call."""
    params = llama_cpp.llama_context_params.from_buffer_copy(llm.context_params)
    params.n_ctx = min(max(256, len(prompt) + len(answer) + 8), max(params.n_ctx, 256))
    params.n_seq_max, params.kv_unified = 1, False
    if hasattr(params, "n_rs_seq"):
        params.n_rs_seq = 0
    context = _internals.LlamaContext(model=llm._model, params=params, verbose=False)
    batch = _internals.LlamaBatch(n_tokens=llm.n_batch, embd=0, n_seq_max=1, verbose=False)
    found: list[Row] = []
    try:
        size, done = llm.n_vocab(), 0
        steps = [list(prompt[i : i + llm.n_batch]) for i in range(0, len(prompt), llm.n_batch)]
        for step in [*steps, *([token] for token in answer)]:
            batch.set_batch(batch=step, n_past=done, logits_all=False)
            context.decode(batch)
            done += len(step)
            if done >= len(prompt):
                row = last_row(context.ctx, size)
                assert row is not None, "the last token's row was asked for"
                found.append(row)
    finally:
        batch.close()
        context.close()
    return found


def compare(
    llm: Any, prompt: Sequence[int], answer: Sequence[int], greedy: bool, first: Row | None
) -> tuple[Sameness, str]:
    """An answer against fresh contexts; `first`: the logits that its first token was sampled from."""
    if not prompt or not (answer or greedy):
        return "unknown", "no token came"
    if not greedy and first is None:
        return "unknown", "sampled, and the logits are not told"
    wanted = rows(llm, prompt, answer[:-1] if greedy else ())
    if not all(np.isfinite(row).all() and np.ptp(row) for row in wanted):
        return "unknown", "a fresh context's logits tell nothing: they are all alike, or no numbers"
    if not answer:
        if llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(llm.model), int(wanted[0].argmax())):
            return "unknown", "no token came, and none need come"
        return "different", "no token came, where a fresh context goes on"
    if first is not None and not (apart := difference(first, wanted[0])) <= TOLERANCE:
        return "different", f"its first logits lie {apart:.0%} of their range from a fresh context's"
    if not greedy:
        return "same", ""
    same: Sameness = "same"
    for step, (token, row) in enumerate(zip(answer, wanted, strict=True)):
        best = int(row.argmax())
        if token == best:
            continue
        margin = float((row[best] - row[token]) / (row.max() - row.min()))
        if not margin <= 2 * TOLERANCE:
            where = f"token {step + 1} of the answer"
            return "different", f"{where} lies {margin:.0%} of the logits' range under a fresh context's"
        same = "tie"
    return same, ""
