"""What a request took, as clients read it: OpenAI's `usage` and llama-server's `timings`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp

from llamahybrid.llama import Llama
from llamahybrid.request.report import RequestReport


def usage(reports: Sequence[RequestReport], ends: Callable[[int], bool]) -> dict[str, Any]:
    """Tokens of all answers to one prompt, which counts once.

    `ends`: this token ends an answer; upstream counts none of those.
    """
    if not reports:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompt = reports[0].total
    said = sum(r.generated - (r.generated > 0 and ends(r.last)) for r in reports)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": reports[0].cached},
    }


def reports_so_far(llm: Llama) -> list[RequestReport]:
    """Of the requests that belong together with those that are made here and now."""
    handle = llm.requests.handle()
    return [] if handle is None else handle.reports


def usage_so_far(llm: Llama) -> dict[str, Any]:
    """The usage of the same."""
    vocab = llm._model.vocab
    return usage(reports_so_far(llm), lambda token: bool(llama_cpp.llama_vocab_is_eog(vocab, token)))


def timings(reports: Sequence[RequestReport]) -> dict[str, Any]:
    """As llama-server's (tools/server/server-common.cpp, server_slot_stats::to_json).

    Milliseconds. Of several answers: the first one's prompt, all tokens, and the time that the longest took.
    """
    if not reports:
        return {}
    first = reports[0]
    prompt_ms = 1e3 * (first.plan_seconds + first.restore_seconds + first.prefill_seconds)
    said = sum(r.generated for r in reports)
    said_ms = 1e3 * max(r.last_token_seconds - r.first_token_seconds for r in reports)
    told: dict[str, Any] = {
        "cache_n": first.cached,
        "prompt_n": first.decoded,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / first.decoded if first.decoded else 0.0,
        "prompt_per_second": _rate(first.decoded, prompt_ms),
        "predicted_n": said,
        "predicted_ms": said_ms,
        "predicted_per_token_ms": said_ms / said if said else 0.0,
        "predicted_per_second": _rate(said, said_ms),
    }
    drafted = sum(r.drafted for r in reports)
    if drafted:
        told["draft_n"] = drafted
        told["draft_n_accepted"] = sum(r.accepted for r in reports)
    return told


def _rate(tokens: int, ms: float) -> float:
    return 1e3 * tokens / ms if ms else 0.0
