"""Positions and times of checkpoints; nothing else decides them.

Pure functions of token counts and measured costs. Positions come from the prompt alone wherever possible
(message starts, an absolute grid), because equal cuts make equal bits, cold or warm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from llamahybrid.prompt_cache.base import Costs, Outline
from llamahybrid.prompt_cache.ladder import (
    MARKED,
    MARKED_ENDS,
    MIN_SPACING,
    RATIOS,
    batch_ends,
    bounding_rungs,
    ladder,
)
from llamahybrid.prompt_cache.nodes import LONGEST_TAIL


class Allowance(NamedTuple):
    """Tokens of a prefill that its cuts may take the time of."""

    short: float
    """Most of a short prompt, as a share of it: what one loses decides the most of a short conversation;"""
    long: float
    """the share of a prompt of `LONG_SUFFIX` tokens and more;"""
    shorter: float
    """and what a shorter one may have on top of that, less in proportion to its length."""


RAW = Allowance(short=0.19, long=0.02, shorter=120.0)
"""Without message starts. `benchmarks.draws --cut 11` decodes 1.045 of the least tokens with it, in a mean
time of 1.077."""

RAW_SCARCE = Allowance(short=0.08, long=0.015, shorter=50.0)
"""The same with `SCARCE` room, where further snapshots evict those of other conversations."""

MARKED_STARTS = Allowance(short=0.08, long=0.025, shorter=50.0)
"""With message starts, where most histories part."""

ONE_CUT = 128
SHORT_SUFFIX = 256
LONG_SUFFIX = 1000
LEAST_CUTS = ((ONE_CUT, 1), (SHORT_SUFFIX, 1), (LONG_SUFFIX, 3))
"""(tokens, below which; cuts that are taken even if they take as long as a prefill, unless others wait for a
prompt without message starts): a prompt of three messages keeps the start of each. Longer ones get one."""

MARKED_CUTS = ((ONE_CUT, 1), (SHORT_SUFFIX, 2), (LONG_SUFFIX, 3))
"""(tokens, below which; most cuts where message starts are known): other cuts would only take bytes."""

SCARCE = 64
"""With room for fewer cuts than this, a prompt is cut at its message starts alone: further snapshots would
evict those of other conversations."""

UNMEASURED_CUT = 5.0
"""Tokens of a prefill that a cut takes the time of, until it was measured: 3 to 7 on CPUs."""

SMALL_OF_ALONE = 0.7
"""Extra time of a small batch at least, in times of a token alone; `CostMeter` measures small batches.

Batches of 4 to 24 tokens took 0.7 to 1.5 with a model of 100M parameters in f16 on 2 cores, by hand. With 0.7
conversations of `benchmarks.draws` take less time than with 1.2, at a cost of 10 tokens a cut."""

MAX_CUTS = 24
"""More rungs are not worth a batch each, however cheap batches are."""

RECENT_STARTS = 8
"""Boundaries worth a cut of their own: an edit reaches back a few messages, each with up to three of them."""

DECODE_GAPS = ((512, 64), (2048, 256))
"""(tokens generated so far, below which; gap): the schedule at the start of an answer, then `LATE_GAP`."""

LATE_GAP = 1024
MIN_DECODE_GAP = 16
"""Nearer checkpoints save less than restoring one costs."""

DECODE_SHARE = 0.01
"""Share of decode time that snapshots may take. With half of it, follow-ups in the middle of an answer decode
1.30 of the least tokens instead of 1.14 (tests/prompt_cache/test_oracle_gap.py)."""

END_SHARE = 0.05
"""Share of a prefill's time that snapshots at its batch ends may take: on a GPU each takes as long as many
tokens of it."""

FREE_SNAPSHOT = 1e-3
"""Seconds of snapshots between two batches that nobody notices, even where a batch takes hardly longer."""

FINAL_TOKENS = 64
"""Tokens since the last checkpoint from which an answer's end gets one."""


def prefill_cuts(outline: Outline, costs: Costs) -> tuple[int, ...]:
    """Return where to cut the prefill of [cached, total) for checkpoints; ascending, at most `most`.

    The prompt's end is no cut. Message starts come first, in order of worth: the deepest one (with a chat
    template that is where stripped thinking diverges; not where histories keep the tokens that ask for an
    answer), places where histories of this kind grew (`growing`, one on top of the others), the first
    boundary (the system prompt's end) of a first prompt, the branch point `matched`, the last message
    (another question may follow the same text), the first boundary, the messages before the last; those alone
    where room is `SCARCE`. A ladder takes the rest of the time budget, counting all waiting requests and the
    `chance` that any of it serves; rungs do where message starts are known or room is `SCARCE`. Batch
    boundaries that the prefill passes anyway come on top: they cost no batch. The branch point comes on top,
    too, where nothing else marks it or histories have `parted` there before, so that the same divergence
    costs only once. Cuts that take longer together than the prefill itself are left out: decoding it again
    costs less.
    """
    total, cached, matched = outline.total, outline.cached, outline.matched
    left = total - cached
    room = left if outline.most is None else outline.most
    gap = 1 if outline.parted else left if outline.boundaries else MIN_SPACING
    known = (matched,) if max(MIN_SPACING, cached + gap) <= matched < total and room else ()
    scarce = outline.most is not None and room < SCARCE
    allowed = MARKED_STARTS if outline.boundaries else RAW_SCARCE if scarce else RAW
    count = min(room - len(known), _affordable(left, costs, allowed))
    if outline.boundaries:
        count = min(count, next((cuts for below, cuts in MARKED_CUTS if left < below), count))
        count -= outline.keeps_asking and outline.boundaries[-1] >= outline.total - LONGEST_TAIL
        apart = any(outline.boundaries[-1] - at >= MIN_SPACING for at in outline.growing)
        count = min(room - len(known), count + apart)
    elif cached == matched:
        count = _likely(count, outline, costs)
    if not outline.boundaries and costs.waiting:
        count = min(count, max(_affordable_beside(left, costs, allowed), int(bool(outline.growing))))
    # the next conversation may begin with the same system prompt
    least = 2 if outline.boundaries and not cached and 2 * cut_tokens(costs) <= left else 0
    starts = _take(_starts(outline), cached, total, min(room - len(known), max(least, count)), known)
    taken = known + starts
    if outline.boundaries and scarce:
        return tuple(sorted(taken))
    finest = MARKED_ENDS if outline.boundaries else RATIOS[0]
    ends = min((room - len(taken)) // 2, _affordable_ends(left, costs))
    taken += batch_ends(total, cached, costs.batch_tokens, ends, taken, finest)
    paid = min(count - len(starts), room - len(taken))
    if outline.boundaries or scarce:
        finest = MARKED if outline.boundaries else RATIOS[0]
        return tuple(sorted(taken + bounding_rungs(total, cached, paid, taken, finest)))
    return tuple(sorted(taken + ladder(total, cached, paid, taken)))


def recut(outline: Outline, position: int, costs: Costs, last: int) -> tuple[int, ...]:
    """Return the cuts still to come when [0, position) is decoded, by newer `costs`.

    `last`: the restore point, or the last cut up to `position`, from which the others keep their distance.
    """
    nearest = max(position + 1, last + MIN_SPACING)
    return tuple(c for c in prefill_cuts(outline, costs) if c >= nearest)


def next_decode_checkpoint(position: int, frontier: int, costs: Costs, together: int = 1) -> int:
    """Return the position of the next checkpoint while generating, on an absolute grid.

    `position`: tokens of the sequence now. `frontier`: where this request's generation began. Gaps follow
    `DECODE_GAPS`, or the cost of a snapshot where that allows nearer ones or demands wider ones. `together`:
    answers decoded in one batch, each of which waits for the snapshots of all; where these take time, a
    checkpoint less than half a gap behind the last is left out.
    """
    generated = position - frontier
    gap = next((gap for below, gap in DECODE_GAPS if generated < below), LATE_GAP)
    if (cheap := _cheap_gap(costs, together)) is not None:
        gap = min(gap, max(MIN_DECODE_GAP, cheap))
    if cheap != 1:
        gap = max(gap, _dear_gap(gap, costs, together))
    apart = gap // 2 if together > 1 and cheap is None else 1
    return -(-(position + apart) // gap) * gap


def final_due(generated: int, costs: Costs) -> bool:
    """Return whether an answer's end gets a checkpoint; `generated`: tokens since the last checkpoint."""
    cheap = _cheap_gap(costs)
    return generated >= (FINAL_TOKENS if cheap is None else min(FINAL_TOKENS, cheap))


def tip_due(left: int) -> bool:
    """Return whether the live tip gets a checkpoint before `left` more prompt tokens are decoded behind it.

    A turn begins there, an edited message diverges from there, and the cut costs no batch.
    """
    return left >= MIN_SPACING


def _cheap_gap(costs: Costs, together: int = 1) -> int | None:
    """Return the gap, in tokens, at which snapshots take about `DECODE_SHARE` of the time.

    None while not measured, or where `together` answers are decoded in one batch and would all wait. A power
    of two, so that costs measured a little differently make the same gap.
    """
    if not costs.token_seconds or not costs.snapshot_seconds:
        return None
    if together * costs.snapshot_seconds <= FREE_SNAPSHOT:
        return 1
    return None if together > 1 else _shared_gap(costs, 1)


def _shared_gap(costs: Costs, together: int) -> int:
    """Return the gap at which the snapshots of all answers of a batch take about `DECODE_SHARE`.

    A step of several answers is taken to last two tokens.
    """
    step = costs.token_seconds * min(2, together)
    share = together * costs.snapshot_seconds / (DECODE_SHARE * step)
    return 1 << round(math.log2(max(1.0, share)))


def _dear_gap(gap: int, costs: Costs, together: int) -> int:
    """Return a gap wider than `gap` that snapshots demand; 0 where they do not, or it was not measured.

    At most `LATE_GAP`, and one whose tokens take no longer in a prompt than those of `gap` took singly: a
    GPU decodes a prompt's tokens 50 times as fast, and copies a state in the time of several answered tokens.
    """
    if not costs.token_seconds or not costs.prefill_seconds:
        return 0
    again = max(1.0, gap * costs.token_seconds / costs.prefill_seconds)
    return min(_shared_gap(costs, together), LATE_GAP, 1 << int(math.log2(again)))


def _affordable(left: int, costs: Costs, allowed: Allowance) -> int:
    """Return the number of cuts that a prefill of `left` tokens may have."""
    if left < ONE_CUT and not costs.prefill_seconds:
        return 1
    least = next((cuts for below, cuts in LEAST_CUTS if left < below), 1)
    if costs.prefill_seconds:
        least = min(least, int(left / cut_tokens(costs)))
    more = max(0.0, allowed.shorter * (1 - left / LONG_SUFFIX))
    allowance = min(allowed.short * left, allowed.long * left + more)
    return max(least, min(MAX_CUTS, int(allowance / cut_tokens(costs))))


def _likely(count: int, outline: Outline, costs: Costs) -> int:
    """Return how many of `count` cuts pay where most histories did not part inside what they added.

    Behind a place where histories part, one is worth it that saves a continued one half of what it added; so
    is one where histories of this kind grew.
    """
    saves = outline.parted and outline.chance * (outline.total - outline.cached) >= 2 * cut_tokens(costs)
    return max(int(outline.chance * count), min(count, int(saves or bool(outline.growing))))


def _affordable_ends(left: int, costs: Costs) -> int:
    """Return the number of batch ends of a prefill of `left` tokens that may have a snapshot."""
    if not costs.prefill_seconds or not costs.snapshot_seconds:
        return left
    return int(END_SHARE * left * costs.prefill_seconds / costs.snapshot_seconds)


def _affordable_beside(left: int, costs: Costs, allowed: Allowance) -> int:
    """Return the same where other requests wait, whose time each cut costs, too."""
    return int(allowed.long * left / (cut_tokens(costs) * (1 + costs.waiting)))


def cut_tokens(costs: Costs) -> float:
    """Return the tokens of a large batch that take as long as a cut: a snapshot, and one more small batch.

    The extra time of a small batch is at least `SMALL_OF_ALONE` of that of a token alone. A large batch whose
    tokens took longer than a token alone was held up, and measures nothing.
    """
    alone = costs.token_seconds - costs.prefill_seconds
    if not costs.prefill_seconds or (alone < 0 if costs.token_seconds else not costs.batch_seconds):
        return UNMEASURED_CUT
    extra = max(costs.batch_seconds, SMALL_OF_ALONE * alone) + costs.snapshot_seconds
    return max(1.0, extra / costs.prefill_seconds)


def _starts(outline: Outline) -> Iterator[int]:
    """Yield places worth a cut of their own, the best first."""
    end = outline.total - (LONGEST_TAIL if outline.keeps_asking else 0)
    inside = [b for b in outline.boundaries if 0 < b < end]
    # a message start just before such a place serves other histories, too
    growing = [max((b for b in inside if 0 <= at - b < MIN_SPACING), default=at) for at in outline.growing]
    yield from (at for at in growing if inside and 0 < inside[-1] - at < MIN_SPACING)  # they lack the rest
    yield from inside[-1:]
    yield from growing
    if inside:
        yield from () if outline.cached else inside[:1]
        yield outline.matched
        yield from inside[-2:-1]
        yield from inside[:1]
        yield from inside[-3 : -2 - RECENT_STARTS : -1]


def _take(
    candidates: Iterator[int], cached: int, total: int, count: int, taken: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the first `count` candidates inside (cached, total) that keep their distance from all others."""
    chosen: list[int] = []
    for position in candidates:
        if len(chosen) == count:
            break
        near = any(abs(position - other) < MIN_SPACING for other in (*taken, *chosen, cached))
        if cached < position < total and not near:
            chosen.append(position)
    return tuple(chosen)
