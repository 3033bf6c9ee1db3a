"""Progress of requests, and their reports, as in `llm.last_request` and `usage`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from llamahybrid.core.schedule import Schedule
from llamahybrid.errors import ModelClosed
from llamahybrid.prompt_cache.base import Bytes, Plan, Source, Tokens

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
    """Why decoding starts behind the cached tokens, in a sentence."""
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
    """Accepted tokens decoded again after a rollback."""
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

    `explain`: also quote the older prompt's token where the prompt differs, maybe another user's.
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


@dataclass
class DraftCounts:
    """Counts of one request's drafts."""

    drafted: int = 0
    """Guessed tokens that were decoded."""
    accepted: int = 0
    """Guessed tokens that the model chose, too."""
    redecoded: int = 0
    """Accepted tokens that were decoded again after a snapshot was loaded to undo guesses."""
    rollbacks: dict[str, int] = field(default_factory=dict)


@dataclass
class Progress:
    """The state of one prompt and its answer."""

    plan: Plan
    schedule: Schedule
    started: float
    """By `time.perf_counter`."""
    plan_seconds: float = 0.0
    restore_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    last_token_seconds: float = 0.0
    generated: int = 0
    last: int = -1
    """The last token handed out."""
    thinking: int | None = None
    """Tokens of the answer's thought; None: not counted."""
    stop: str = ""
    """Stop string that ended the answer."""
    sent: bool = False
    """Tokens had been sent into the generator before it was preempted."""
    steps: int = 0
    """Batches of the answer."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    checkpoints: int = 0
    """Checkpoints that the cache accepted."""
    prefilling: bool = True
    reached: int = 0
    """End of the last finished batch of the prompt."""
    cancelled: bool = False
    staged: list[tuple[int, Bytes]] = field(default_factory=list)
    """Checkpoints of this prefill, (position, snapshot), to be stored once its logits are finite."""
    prompt: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """All of the prompt, shape (total,)."""
    said: list[int] = field(default_factory=list)
    """Tokens sampled by the loop."""
    decoded: int = 0
    """Number of these that are decoded."""
    on_progress: Callable[[PromptProgress], None] | None = None
    """Called with the progress of the prompt at the restore point and after each batch."""

    def report(self, spell: Callable[[int], str] = str, *, explain: bool = False) -> RequestReport:
        """Return a report of the request so far; `spell` gives a token's text, `explain` as in `sentence`."""
        in_prompt = self.prefilling and not self.generated
        names = [each.name for each in fields(RequestReport) if hasattr(self, each.name)]
        return RequestReport(
            total=self.plan.total,
            matched=self.plan.matched,
            cached=self.plan.cached,
            unreached=self.plan.total - max(self.plan.cached, self.reached) if in_prompt else 0,
            source=self.plan.source,
            reason=sentence(self.plan, spell, explain=explain),
            **asdict(self.drafts),
            **{name: getattr(self, name) for name in names},
        )

    def reach(self, end: int) -> None:
        """Note the end of a batch of the prompt. Raises errors of `on_progress`."""
        self.reached = end
        if self.on_progress is not None:
            seconds = time.perf_counter() - self.started
            self.on_progress(PromptProgress(self.plan.total, self.plan.cached, end, seconds))

    def hand_out(self, token: int) -> None:
        """Note a token before its caller gets it."""
        self.last_token_seconds = time.perf_counter() - self.started
        if self.generated == 0:
            self.first_token_seconds = self.last_token_seconds
        self.generated += 1
        self.last = token

    def drop_records(self) -> None:
        """Drop the records of the plan, which reports would keep in memory."""
        self.plan = replace(self.plan, checkpoint=None, logits=None, segments=())


def text_of_token(model: Any, token: int) -> str:
    """Return the text of a token; its id for native content and for a closed model."""
    try:
        text: bytes = model.detokenize([token], special=True)
    except (ModelClosed, ValueError):
        return str(token)
    return text.decode("utf-8", "replace")
