"""The plan of a request, from live state and RAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamahybrid.prompt_cache.base import Costs, LiveView, Outline, Plan, Range, Tokens
from llamahybrid.prompt_cache.nodes import Entry, Match, common_prefix
from llamahybrid.prompt_cache.placement import prefill_cuts
from llamahybrid.prompt_cache.selection import Attention, Choice, choose, difference, reachable, reason
from llamahybrid.prompt_cache.tree import Tree


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
        reach = min(reach, max(live_lcp, match.length))
    return choose(total, live_lcp, view, entries, reach, costs, attention.live_kept), attention


def plan_request(
    tree: Tree,
    match: Match,
    tokens: Tokens,
    view: LiveView,
    boundaries: Sequence[int],
    costs: Costs,
    limit: int,
    last_tail: int,
) -> tuple[Plan, Entry | None]:
    """Plan a prompt by its match; return also the checkpoint that the plan uses.

    A segment that crosses the restore point is cut in two. `limit`: bytes of the budget; `last_tail`: see
    `Outline.tail`, of the last prompt of this namespace.
    """
    total, entries, parted = len(tokens), match.entries(), match.branches()
    live_lcp = common_prefix(tokens, view.tokens)
    choice, attention = restore_point(match, entries, total, live_lcp, view, costs)
    while loads := choice.source == "ram" and (choice.position > live_lcp or view.attention_is_all):
        damaged = tree.damaged
        tree.divide(view.namespace, match, choice.position)
        choice, attention = restore_point(match, entries, total, live_lcp, view, costs)
        if tree.damaged == damaged:  # else one segment went
            break
    cached, matched = choice.position, max(live_lcp, match.length)
    outline = None
    if view.needs_checkpoints:
        most = max(1, limit // (2 * max(1, costs.snapshot_bytes)))  # half the budget is for what is known
        known = match.length == matched and parted
        outline = Outline(total, cached, matched, tuple(boundaries), most, known, match.tail() or last_tail)
    entry = choice.entry
    from_ram = choice.source == "ram" and not view.attention_is_all
    plan = Plan(
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
        stored=any(e.position == cached for e in entries),
        segments=attention.up_to(cached) if loads else (),
        live_kept=attention.live_kept,
    )
    return plan, entry


def unplanned(total: int) -> Plan:
    """The plan of a prompt that is decoded from its first token on."""
    return Plan(total=total, matched=0, cached=0, source="none", checkpoint=None, logits=None)
