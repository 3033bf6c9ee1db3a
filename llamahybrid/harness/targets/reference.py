"""Comparison of answers with those of fresh contexts, on llama.cpp's functions alone.

The first context reuses nothing: prompt in whole batches, answer token by token. A greedy choice that lies
under its best by no more than two right runs may differ is a tie.

Two right runs differ by more on quantized weights, because a row that is decoded alone goes through another
kernel and activations are quantized: 1.6 to 2.7 % of the logits' range on SmolLM2 135M Q4_1 and Gemma 3 270M
Q4_K_M. So an answer that the first context does not confirm is compared with a second one, which decodes each
token in the piece in which stock's own prefix reuse would have: the reused tokens as they were decoded first,
then the rest. With the same pieces, right logits are those of this context bit for bit; otherwise the
distance of the two contexts is that of right runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _internals

from llamahybrid.harness.report import Sameness
from llamahybrid.harness.targets.base import GPU_TOLERANCE, LARGEST_TOLERANCE, TOLERANCE

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


def pieces_of(prompt: int, answer: int, n_batch: int, reused: Sequence[int] = (0,)) -> list[int]:
    """Return where each native batch begins that decodes a prompt and its answer, and the end of the last.

    `prompt`, `answer`: tokens; the answer's last token is not decoded. `reused`: where the batches began that
    decoded what is reused, and the first token that has to be decoded now.
    """
    *before, start = reused
    return [*before, *range(start, prompt, n_batch), *range(prompt, prompt + max(1, answer))]


@contextmanager
def fresh_context(llm: Any, n_ctx: int) -> Iterator[tuple[Any, Callable[[Sequence[int], int], None]]]:
    """A context of `llm`'s model for one sequence, and a function that decodes tokens at a position."""
    params = llama_cpp.llama_context_params.from_buffer_copy(llm.context_params)
    params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx, 1, False
    if hasattr(params, "n_rs_seq"):
        params.n_rs_seq = 0
    context = _internals.LlamaContext(model=llm._model, params=params, verbose=False)
    batch = _internals.LlamaBatch(n_tokens=llm.n_batch, embd=0, n_seq_max=1, verbose=False)

    def decode(tokens: Sequence[int], begin: int) -> None:
        batch.set_batch(batch=tokens, n_past=begin, logits_all=False)
        context.decode(batch)

    try:
        yield context, decode
    finally:
        batch.close()
        context.close()


def rows(
    llm: Any, prompt: Sequence[int], answer: Sequence[int], pieces: Sequence[int] | None = None
) -> list[Row]:
    """Logits at the prompt's end and after each of the answer's tokens, from a context made for this call.

    `pieces`: where native batches begin, as of `pieces_of`; None: those of a context that reuses nothing.
    """
    tokens, found = [*prompt, *answer], list[Row]()
    n_ctx = min(max(256, len(tokens) + 8), max(llm.context_params.n_ctx, 256))
    if pieces is None:
        pieces = pieces_of(len(prompt), len(answer) + 1, llm.n_batch)
    with fresh_context(llm, n_ctx) as (context, decode):
        for begin, end in pairwise(pieces):
            decode(tokens[begin:end], begin)
            if end >= len(prompt):
                row = last_row(context.ctx, llm.n_vocab())
                assert row is not None, "the last token's row was asked for"
                found.append(row)
    return found


def compare(
    llm: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    greedy: bool,
    first: Row | None,
    pieces: Sequence[int] | None = None,
) -> tuple[Sameness, str]:
    """Compare an answer with contexts made for that.

    `first`: the logits that its first token was sampled from; `pieces`: where the native batches begin in
    which stock's own prefix reuse would have decoded prompt and answer; None: not known.
    """
    if not prompt or not (answer or greedy):
        return "unknown", "no token came"
    if not greedy and first is None:
        return "unknown", "sampled, and the logits are not told"
    more = answer[:-1] if greedy else ()
    cold, usual = rows(llm, prompt, more), usual_tolerance()
    if not all(np.isfinite(row).all() and np.ptp(row) for row in cold):
        return "unknown", "a fresh context's logits tell nothing: they are all alike, or no numbers"
    if not answer:
        if llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(llm.model), int(cold[0].argmax())):
            return "unknown", "no token came, and none need come"
        return "different", "no token came, where a fresh context goes on"
    fault = fault_of(answer, greedy, first, cold, usual)
    if fault is None:
        tied = greedy and any(int(row.argmax()) != token for token, row in zip(answer, cold, strict=True))
        return "tie" if tied else "same", ""
    if pieces is None:
        return "different", fault
    again = rows(llm, prompt, more, pieces[: len(pieces) - (0 if greedy else len(answer) - 1)])
    if fault_of(answer, greedy, first, again, usual) is None:
        return "tie", ""
    apart = max(difference(one, other) for one, other in zip(again, cold, strict=True))
    tolerance = max(usual, 2 * apart)
    said = f"; two right contexts differ by {apart:.1%} here"
    if all(fault_of(answer, greedy, first, each, tolerance) for each in (cold, again)):
        return "different", f"{fault}{said}"
    return ("tie", "") if tolerance <= LARGEST_TOLERANCE else ("unknown", said.removeprefix("; "))


def usual_tolerance() -> float:
    """Share of the logits' range within which two right contexts lie; larger where there is a GPU.

    A GPU computes large batches of layers that lie in RAM, too (`op_offload`).
    """
    return GPU_TOLERANCE if llama_cpp.llama_supports_gpu_offload() else TOLERANCE


def fault_of(
    answer: Sequence[int], greedy: bool, first: Row | None, wanted: Iterable[Row], tolerance: float
) -> str | None:
    """Say how an answer differs from rows of logits by more than `tolerance`, a share of their range."""
    expected = list(wanted)
    if first is not None and not (apart := difference(first, expected[0])) <= tolerance:
        return f"its first logits lie {apart:.1%} of their range from a fresh context's"
    if not greedy:
        return None
    for step, (token, row) in enumerate(zip(answer, expected, strict=True)):
        margin = float((row.max() - row[token]) / (row.max() - row.min()))
        if not margin <= 2 * tolerance:
            where = f"token {step + 1} of the answer"
            return f"{where} lies {margin:.1%} of the logits' range under a fresh context's"
    return None
