"""Numbers of a request: OpenAI's `usage`, llama-server's `timings`, and the line of the page at /cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp

from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.llama import Llama


def leading(reports: Sequence[RequestReport], prompts: int = 1) -> Sequence[RequestReport]:
    """Return the reports that decoded a prompt; further answers to it go on from its end."""
    return reports[:1] if prompts == 1 else sorted(reports, key=lambda report: -report.left)[:prompts]


def usage(reports: Sequence[RequestReport], ends: Callable[[int], bool], prompts: int = 1) -> dict[str, Any]:
    """Return the tokens of all answers to `prompts` prompts, each of which counts once.

    `ends`: True for a token that ends an answer; as upstream, those do not count.
    """
    if not reports:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompt = reports[0].total if prompts == 1 else sum(r.total for r in reports) * prompts // len(reports)
    left = sum(report.left for report in leading(reports, prompts))
    said = sum(r.generated - (r.generated > 0 and ends(r.last)) for r in reports)
    thoughts = [report.thinking for report in reports if report.thinking is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": prompt - left},
        **({"completion_tokens_details": {"reasoning_tokens": sum(thoughts)}} if thoughts else {}),
    }


def reports_so_far(llm: Llama) -> list[RequestReport]:
    """Return the reports of the current request's answers so far."""
    handle = llm.requests.handle()
    return [] if handle is None else handle.reports


def usage_so_far(llm: Llama, prompts: int = 1, stops: frozenset[int] = frozenset()) -> dict[str, Any]:
    """Return the usage of the current request so far; `stops`: further tokens that end an answer."""
    vocab = llm._model.vocab

    def ends(token: int) -> bool:
        return token in stops or bool(llama_cpp.llama_vocab_is_eog(vocab, token))

    return usage(reports_so_far(llm), ends, prompts)


def timings(reports: Sequence[RequestReport], prompts: int = 1) -> dict[str, Any]:
    """Return llama-server's `timings` (tools/server/server-common.cpp, server_slot_stats::to_json).

    Milliseconds. Several answers count each prompt once, all tokens, and the longest time.
    """
    if not reports:
        return {}
    first = leading(reports, prompts)
    decoded, cached = sum(r.decoded for r in first), sum(r.cached for r in first)
    prompt_ms = 1e3 * sum(r.plan_seconds + r.restore_seconds + r.prefill_seconds for r in first)
    said = sum(r.generated for r in reports)
    said_ms = 1e3 * max(r.last_token_seconds - r.first_token_seconds for r in reports)
    told: dict[str, Any] = {
        "cache_n": cached,
        "prompt_n": decoded,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / decoded if decoded else 0.0,
        "prompt_per_second": _rate(decoded, prompt_ms),
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


def prompt_progress(progress: PromptProgress) -> dict[str, float]:
    """Return llama-server's numbers (tools/server/server-task.cpp, result_prompt_progress::to_json)."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(1e3 * progress.seconds, 3),
    }


def summary(
    reports: Sequence[RequestReport], reasons: Sequence[str], waited: float, end: str
) -> dict[str, Any]:
    """Return a request that is over as the page at /cache shows it, without a token of its prompt.

    `waited`: seconds in the queue. `end`: "done", "cancelled" or "failed".
    """
    first = reports[0] if reports else RequestReport(0, 0, 0, "none", "")
    return {
        "ended": time.time(),
        "end": end,
        "waited": waited,
        "prompt": first.total,
        "cached": first.cached,
        "matched": first.matched,
        "generated": sum(report.generated for report in reports),
        "source": first.source,
        "reason": next(iter(reasons), ""),
        "first_token_seconds": first.first_token_seconds,
    }


def _rate(tokens: int, ms: float) -> float:
    return 1e3 * tokens / ms if ms else 0.0
