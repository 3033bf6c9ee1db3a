"""What a request did, as handed out in `llm.last_request` and `usage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llamahybrid.prompt_cache.base import Plan, Source

PLACES: Mapping[Source, str] = {"ram": "RAM", "disk": "disk", "remote": "the remote store"}
"""What stored restore points come from, in words."""


@dataclass(frozen=True)
class RequestReport:
    """One request. Tokens: total = cached + left; matched is the longest prefix known to anything."""

    total: int
    """Tokens of the prompt."""
    matched: int
    """The longest prefix of it known to anything: live, in RAM, on disk or in the remote store."""
    cached: int
    """Prompt tokens that were not decoded again."""
    source: Source
    """Where the restore point came from: the live sequence, RAM, disk, the remote store, or nothing."""
    reason: str
    """One plain sentence on how the prompt started (see `sentence`)."""
    generated: int = 0
    """Tokens handed out so far."""
    thinking: int | None = None
    """Those of them that the answer's thought has, without its markers; None: no thought is told apart."""
    steps: int = 0
    """Native batches that the answer took: fewer than tokens where drafts were right."""
    drafted: int = 0
    """Tokens that a draft model guessed and that were decoded."""
    accepted: int = 0
    """Those of them that became part of the answer."""
    redecoded: int = 0
    """Certain tokens decoded once more after a wrong guess, where its undoing took them along."""
    rollbacks: Mapping[str, int] = field(default_factory=dict)
    """How often guesses were taken back, by kind: "cut" (attention), "planes" (of a recurrent memory), or
    "snapshot" (what was right behind it is decoded again)."""
    checkpoints: int = 0
    """Checkpoints taken by this request."""
    plan_seconds: float = 0.0
    """Choosing the restore point and the cuts."""
    restore_seconds: float = 0.0
    """Bringing memory to the restore point."""
    prefill_seconds: float = 0.0
    """Decoding what was left of the prompt."""
    first_token_seconds: float = 0.0
    """From the request's start to its first token."""
    last_token_seconds: float = 0.0
    """From the request's start to its last token so far."""
    last: int = -1
    """The last token handed out; -1: none."""
    cancelled: bool = False
    """`cancel()` ended it."""
    unreached: int = 0
    """Prompt tokens that were not decoded: it is not there yet, or was ended before."""

    @property
    def left(self) -> int:
        """Prompt tokens that had to be decoded."""
        return self.total - self.cached

    @property
    def decoded(self) -> int:
        """Those that were, so far."""
        return self.left - self.unreached


@dataclass(frozen=True)
class PromptProgress:
    """How far a prompt has come: cached <= processed <= total."""

    total: int
    """Tokens of the prompt."""
    cached: int
    """Those that are not decoded again."""
    processed: int
    """Those that are there: cached, or decoded so far."""
    seconds: float
    """Since the request began."""


def sentence(plan: Plan, spell: Callable[[int], str] | None = str, *, explain: bool = False) -> str:
    """A plan's reason in words; `spell` gives a token's text, None: no token is named.

    `explain`: the token that the prompt parts from is spelt, too. It may be another user's.
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
