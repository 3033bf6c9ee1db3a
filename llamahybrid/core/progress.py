"""Progress: the state of one prompt and its answer, from the plan to the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from llamahybrid.core.report import PromptProgress, RequestReport, sentence
from llamahybrid.core.schedule import Schedule
from llamahybrid.prompt_cache.base import Bytes, Plan, Tokens
from llamahybrid.speculation.drafts import DraftCounts


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
    over: bool = False
    """Its sequence was taken by another request or a loaded state: it cannot continue."""
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
        return RequestReport(
            total=self.plan.total,
            matched=self.plan.matched,
            cached=self.plan.cached,
            unreached=self.plan.total - max(self.plan.cached, self.reached) if in_prompt else 0,
            source=self.plan.source,
            reason=sentence(self.plan, spell, explain=explain),
            generated=self.generated,
            thinking=self.thinking,
            steps=self.steps,
            drafted=self.drafts.drafted,
            accepted=self.drafts.accepted,
            redecoded=self.drafts.redecoded,
            rollbacks=dict(self.drafts.rollbacks),
            checkpoints=self.checkpoints,
            stop=self.stop,
            cancelled=self.cancelled,
            plan_seconds=self.plan_seconds,
            restore_seconds=self.restore_seconds,
            prefill_seconds=self.prefill_seconds,
            first_token_seconds=self.first_token_seconds,
            last_token_seconds=self.last_token_seconds,
            last=self.last,
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
