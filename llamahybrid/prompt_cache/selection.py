"""The restore point and the plan of a prompt: complete prefixes only, the deepest first, live before stored.

A checkpoint at c serves iff its c tokens are the prompt's first c and c <= total - 1, or c == total and the
logits there are known; so does the live state, cut to c. A snapshot without attention KV needs that of [0, c)
live or stored in segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llamahybrid.prompt_cache.base import (
    Costs,
    LiveView,
    Logits,
    Outline,
    Plan,
    Range,
    Reason,
    Segment,
    Source,
    Tokens,
)
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.nodes import Entry, Following, Match, common_prefix, ids_of
from llamahybrid.prompt_cache.placement import prefill_cuts

UNMEASURED = Costs()

SMALL_BATCH = 64
"""Tokens from which a restore point is used, however long a small batch took on a busy machine."""


@dataclass(frozen=True)
class Choice:
    """The restore point of a request."""

    position: int
    source: Literal["live", "ram", "none"]
    entry: Entry | None
    """The checkpoint used: its snapshot (source "ram") or only its logits ("live").

    None with "ram" where no checkpoint lies at the position: attention is all that is needed there."""
    logits: Logits | None

    @property
    def tier(self) -> Source:
        """The origin of the restore point: the tier outside, if it was read into RAM just now."""
        read = self.entry.read_from if self.source == "ram" and self.entry is not None else None
        return read or self.source

    def loads(self, live_lcp: int, view: LiveView) -> bool:
        """Return whether attention has to be loaded for it, behind that of [0, live_lcp)."""
        return self.source == "ram" and (self.position > live_lcp or view.attention_is_all)


@dataclass(frozen=True)
class Attention:
    """The attention that is there for a prompt: live tokens first, stored segments behind them."""

    live_kept: int
    """Live tokens that stay where segments are loaded behind them."""
    segments: tuple[Segment, ...]
    reach: int
    """Attention of [0, reach) is live or stored."""

    def up_to(self, position: int) -> tuple[Segment, ...]:
        """The segments to load for a restore point; the last one may reach beyond it."""
        return tuple(s for s in self.segments if s.start < position)


def reachable(live_lcp: int, segments: Sequence[Segment]) -> Attention:
    """Extend the live prefix [0, live_lcp) by `segments` of a prompt's path, ascending and disjoint.

    Cells must lie in the order of their positions, or the numbers differ in their last bits: live memory is
    therefore cut to the start of the first segment that is loaded.
    """
    run: list[Segment] = []
    reach = live_lcp
    for segment in segments:
        if segment.start <= reach < segment.end:
            run.append(segment)
            reach = segment.end
    return Attention(run[0].start if run else live_lcp, tuple(run), reach)


def choose(
    total: int,
    live_lcp: int,
    view: LiveView,
    entries: Sequence[Entry],
    reach: int,
    costs: Costs = UNMEASURED,
    live_kept: int = 0,
) -> Choice:
    """Pick the restore point for a prompt of `total` tokens.

    `live_lcp`: common prefix of prompt and live sequence. `entries`: checkpoints on the prompt's own path,
    shallowest first. `reach`: attention of [0, reach) is live or stored; of [0, live_kept) it stays live. A
    stored one is left alone where it saves less time than restoring it takes, or than a small batch: the
    first batch would be cut elsewhere, which moves the last bits of the logits, for nothing.
    """
    limit = total if view.reuse_limit is None else view.reuse_limit
    at_end = next((e for e in reversed(entries) if e.position == total), None)
    stored = at_end.checkpoint.logits if at_end is not None else None
    if stored is None and view.end_logits is not None:
        end, logits = view.end_logits
        stored = logits if end == total else None

    live = _live_position(total, live_lcp, limit, view, stored)
    if view.attention_is_all:
        position = min(limit, reach, total - 1)
        if position >= live + MIN_SPACING and _pays(position, live, live_kept, total - position, costs):
            return Choice(position, "ram", next((e for e in entries if e.position == position), None), None)
        entries = ()  # none has logits
    deepest = min(limit, reach) if view.needs_attention else limit
    usable = (e for e in reversed(entries) if e.position <= deepest)
    best = next((e for e in usable if e.position < total or e.checkpoint.logits is not None), None)

    if best is not None and _pays(best.position, live, live_lcp, total - best.position, costs):
        return Choice(best.position, "ram", best, best.checkpoint.logits if best.position == total else None)
    if live == 0:
        return Choice(0, "none", None, None)
    if live == total and not _tip_serves(total, view):
        return Choice(live, "live", at_end, stored)
    return Choice(live, "live", None, None)


def reason(choice: Choice, total: int, matched: int, live_tokens: int) -> Reason:
    """Why a prompt of `total` tokens starts at this restore point."""
    if total and choice.position == total:
        return Reason("repeated", stored_logits=choice.logits is not None)
    if choice.source == "live" and choice.position == live_tokens:
        return Reason("extended")
    return Reason("known" if matched else "unknown")


def _pays(position: int, live: int, attended: int, left: int, costs: Costs) -> bool:
    """Return whether restoring at `position` is no slower than decoding to it from `live`, as measured.

    `attended`: no attention has to be loaded before it. `left`: tokens that are decoded behind it anyway.
    """
    saved = position - live
    if left and saved < SMALL_BATCH and saved * costs.prefill_seconds < costs.batch_seconds:
        return False
    if saved < max(1, min(MIN_SPACING, left)):
        return False
    loading = max(0, position - attended) * costs.segment_seconds
    return not costs.prefill_seconds or costs.restore_seconds + loading <= _decoding(saved, costs)


def _decoding(tokens: int, costs: Costs) -> float:
    """Return the seconds to decode prompt tokens: a small batch takes as long as a token alone, at least."""
    return max(costs.token_seconds, tokens * costs.prefill_seconds)


def _tip_serves(total: int, view: LiveView) -> bool:
    """The context's own logits are those of the prompt's last token."""
    return view.tip_logits and len(view.tokens) == total


def _live_position(total: int, lcp: int, limit: int, view: LiveView, stored: Logits | None) -> int:
    """The deepest position the live state can be cut to for this prompt; 0 if there is none."""
    position = min(lcp, limit)
    if position == total and stored is None and not _tip_serves(total, view):
        position -= 1
    return position if position >= view.cut_floor else 0


def difference(prompt: Tokens, live: Tokens, live_lcp: int, match: Match) -> tuple[int, int] | None:
    """The prompt's token where it leaves all that is known, and the token there was instead, if any."""
    at = max(live_lcp, match.length)
    if at == 0 or at == len(prompt):
        return None
    old = match.follower() if match.length == at else None
    if old is None and live_lcp == at < len(live):
        old = int(live[at])
    return None if old is None else (int(prompt[at]), old)


@dataclass(frozen=True)
class Known:
    """Knowledge of RAM about a prompt."""

    length: int = 0
    """Tokens of it on some path."""
    branches: bool = True
    """Known paths part there."""
    cached: int = 0
    """The restore point that live state and RAM offer."""
    missing: tuple[Range, ...] = ()
    """Ranges whose attention is neither live nor stored, ascending."""
    forgets: int = -1
    """Number of `forget` calls until now."""


def restore_point(
    match: Match, entries: Sequence[Entry], total: int, live_lcp: int, view: LiveView, costs: Costs
) -> tuple[Choice, Attention]:
    """Return the best restore point of a prompt of `total` tokens, and how far its attention reaches.

    `entries`: checkpoints of the match.
    """
    # A window has lost the beginning of its attention (see `LiveView.cut_floor`).
    kept = 0 if view.attention_is_all and view.cut_floor else live_lcp
    attention = reachable(kept, match.segments() if view.split is not None else ())
    reach = attention.reach
    if view.attention_is_all:  # the last segment may be another path's behind the match
        reach = min(reach, max(kept, match.length))
    return choose(total, live_lcp, view, entries, reach, costs, attention.live_kept), attention


CONTINUED = 2
"""Prompts that went on behind the end of an earlier one, before it is assumed that the next ones do, too."""

MOST_MOVED = 4
"""Texts that are looked for in each prompt: a client sends a few kinds of prompts in turn."""


@dataclass
class Habits:
    """Divergences of the prompts of one namespace from earlier ones."""

    boundaries: frozenset[int] = frozenset()
    """Message starts of the last prompt that had any."""
    moved: tuple[Following, ...] = ()
    """Texts before which a prompt had more than the one it parted from: closing instructions behind a chat or
    a document, tools behind a system prompt that grows, what asks for an answer. The last one seen first."""
    continued: int = 0
    """Prompts that went on behind the end of an earlier one; -1 once one parted inside the tokens that ask
    for an answer."""

    @property
    def keeps_asking(self) -> bool:
        """See `Outline.keeps_asking`."""
        return self.continued >= CONTINUED

    def learn(self, match: Match, entries: Sequence[Entry], tokens: Tokens) -> None:
        """Learn from a prompt; `entries`: checkpoints of the match."""
        if match.parts_in_tail():
            self.continued = -1
        elif self.continued >= 0:
            ends = (e.position for e in entries if e.checkpoint.logits is not None)
            self.continued += any(end < len(tokens) for end in ends)
        text = match.following()
        if text is not None and text.place_in(ids_of(tokens[match.length :])) is not None:
            others = (other for other in self.moved if other != text)
            self.moved = (text, *others)[:MOST_MOVED]

    def growing(self, tokens: Tokens, cached: int) -> tuple[int, ...]:
        """Return the places behind `cached` where a prompt has texts that were `moved`, ascending."""
        ids = ids_of(tokens[cached:])
        found = {place for text in self.moved if (place := text.place_in(ids)) is not None}
        return tuple(cached + place for place in sorted(found))


def plan_request(
    match: Match,
    tokens: Tokens,
    view: LiveView,
    boundaries: Sequence[int],
    costs: Costs,
    limit: int,
    habits: Habits,
    start: tuple[Choice, Attention],
) -> Plan:
    """Plan a prompt by its match and its `restore_point`, which no segment crosses.

    `limit`: bytes of the budget; `habits`: of this namespace.
    """
    total, (choice, attention), parted = len(tokens), start, match.branches()
    live_lcp = common_prefix(tokens, view.tokens)
    cached, matched = choice.position, max(live_lcp, match.length)
    outline = None
    if view.needs_checkpoints:
        most = max(1, limit // (2 * max(1, costs.snapshot_bytes)))  # half the budget is for what is known
        known = match.length == matched
        chance = match.chance() if known and not boundaries else 1.0
        learned = habits.growing(tokens, cached), chance, habits.keeps_asking
        outline = Outline(total, cached, matched, tuple(boundaries), most, known and parted, *learned)
    entry = choice.entry
    from_ram = choice.source == "ram" and not view.attention_is_all
    return Plan(
        total=total,
        matched=matched,
        cached=cached,
        source=choice.tier,
        checkpoint=entry.checkpoint if entry is not None and from_ram else None,
        logits=choice.logits,
        cuts=() if outline is None else prefill_cuts(outline, costs),
        outline=outline,
        reason=reason(choice, total, matched, len(view.tokens)),
        differs=difference(tokens, view.tokens, live_lcp, match),
        stored=any(e.position == cached for e in match.entries()),
        segments=attention.up_to(cached) if choice.loads(live_lcp, view) else (),
        live_kept=attention.live_kept,
    )
