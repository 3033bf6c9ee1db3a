"""Reports of requests, as in `llm.last_request` and `usage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llamahybrid.prompt_cache.base import Plan, Source

PLACES: Mapping[Source, str] = {"ram": "RAM", "disk": "disk", "remote": "the remote store"}
"""Names of the places of stored restore points."""


@dataclass(frozen=True)
class RequestReport:
    """Report of one request; total = cached + left."""

    total: int
    """Tokens of the prompt."""
    matched: int
    """Length of the longest prefix known to the slots, RAM, disk or remote store."""
    cached: int
    """Prompt tokens that were not decoded again."""
    source: Source
    """Origin of the restore point: live, ram, disk, remote or none."""
    reason: str
    """The start of the prompt, in a sentence."""
    generated: int = 0
    """Tokens handed out so far."""
    thinking: int | None = None
    """Generated tokens of the answer's thought, without its markers; None: thoughts are not recognized."""
    steps: int = 0
    """Batches of the answer: fewer than tokens if drafts were accepted."""
    drafted: int = 0
    """Draft tokens decoded."""
    accepted: int = 0
    """Draft tokens that became part of the answer."""
    redecoded: int = 0
    """Right tokens decoded again after a rollback."""
    rollbacks: Mapping[str, int] = field(default_factory=dict)
    """Rollbacks of drafts by kind: "cut", "planes" or "snapshot"."""
    checkpoints: int = 0
    """Checkpoints taken by this request."""
    plan_seconds: float = 0.0
    """Time to choose the restore point and the cuts."""
    restore_seconds: float = 0.0
    """Time to restore memory."""
    prefill_seconds: float = 0.0
    """Time to decode the rest of the prompt."""
    first_token_seconds: float = 0.0
    """From the request's start to its first token."""
    last_token_seconds: float = 0.0
    """From the request's start to its last token so far."""
    last: int = -1
    """Last token handed out; -1: none."""
    stop: str = ""
    """Stop string that ended the answer."""
    cancelled: bool = False
    """Ended by `cancel()`."""
    unreached: int = 0
    """Prompt tokens not decoded yet, or not before a cancellation."""

    @property
    def left(self) -> int:
        """Prompt tokens to decode."""
        return self.total - self.cached

    @property
    def decoded(self) -> int:
        """Prompt tokens decoded so far."""
        return self.left - self.unreached


@dataclass(frozen=True)
class PromptProgress:
    """Progress of a prompt: cached <= processed <= total."""

    total: int
    """Tokens of the prompt."""
    cached: int
    """Tokens not decoded again."""
    processed: int
    """Tokens cached or decoded so far."""
    seconds: float
    """Time since the request began."""


def sentence(plan: Plan, spell: Callable[[int], str] | None = str, *, explain: bool = False) -> str:
    """Return a plan's reason in words; `spell` gives a token's text, None: no token is named.

    `explain`: also name the known token at which the prompt differs, maybe another user's.
    """
    total, matched, cached = plan.total, plan.matched, plan.cached
    if plan.reason is None:
        return ""
    if plan.reason.start == "repeated":
        how = "stored logits" if plan.reason.stored_logits else "the live logits"
        return f"exact prompt repeated: sampling from {how}"
    if plan.reason.start == "extended":
        return f"live sequence extended by {total - cached} tokens"
    if plan.reason.start == "unknown":
        return "nothing in common with anything known"
    known = _divergence(plan, spell, explain) if matched < total else "whole prompt known"
    lost = f", {matched - cached:,} known tokens lost" if matched - cached > 1 else ""
    if plan.source == "none":
        return f"{known}; no restore point before it{lost}"
    if plan.source == "live":
        return f"{known}; live sequence cut to {cached:,}{lost}"
    return f"{known}; restored at {cached:,} from {PLACES[plan.source]}{lost}"


def _divergence(plan: Plan, spell: Callable[[int], str] | None, explain: bool) -> str:
    where = f"history differs at token {plan.matched:,} of {plan.total:,}"
    if plan.differs is None or spell is None:
        return where
    new, old = map(spell, plan.differs)
    return f"{where}: {new!r} was {old!r}" if explain else f"{where}, {new!r}"
