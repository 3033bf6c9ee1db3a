"""Where checkpoints are taken: the only place that decides cut positions and checkpoint times.

Pure functions of token counts and measured costs. Positions come from the prompt alone wherever possible
(message starts, an absolute grid), because equal cuts make equal bits, cold or warm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from llamahybrid.prompt_cache.base import Costs

MIN_SPACING = 8
"""Cuts nearer than this to one another, or to the restore point, save less than their small batch costs."""

SHORT_SUFFIX = 256
"""Below this one cut is the rule, about a tenth of the prefill of 100 tokens; a second one (it keeps the
start of an edited message, or a branch point) unless both were measured to cost more than `SHORT_SHARE`."""

SHORT_CUTS = 2
ONE_CUT = 128
"""Below this a second cut is never taken: two cost 18 % of a prefill of 100 tokens."""
SHORT_SHARE = 0.10

LONG_SUFFIX = 1000
"""From here on the cuts may cost `LONG_SHARE` of the prefill; between the two, `MEDIUM_CUTS`."""

LONG_SHARE = 0.02
MEDIUM_CUTS = 3

UNMEASURED_TOKENS_PER_CUT = 500
"""Without measured costs one cut for so many tokens: 2 to 6 cuts on 3,000 tokens stayed within 3 %."""

MAX_CUTS = 12
"""More rungs than the ladder has are not worth a batch each, however cheap batches are."""

LADDER = ((32, 16), (128, 64), (512, 512), (2048, 512), (8192, 512))
"""(tokens before the prompt's end, grid): gaps grow with the distance, so that a divergence d tokens back
costs at most a constant factor of d. 32 and 128 serve prompts without message starts, of which few have more
than three cuts: with 64 in place of 32 a few-shot batch decoded 1.37 of the least, not 1.05."""

TURN_END = (4, 8)
"""(tokens before the prompt's end, grid) of the first cut where no message starts are known: what asks for an
answer is a few tokens long, and the next history often differs there: on a grid of 16 four users in turn
decoded 1.06 of the least, not 1.03."""

FREE_GRID = 512
"""Batch boundaries are taken for free checkpoints, but no denser than this."""

RECENT_STARTS = 8
"""Boundaries worth a cut of their own: an edit reaches back a few messages, each with up to three of them."""

DECODE_GAPS = ((512, 64), (2048, 256))
"""(tokens generated so far, below which; gap): the schedule at the start of an answer, then `LATE_GAP`."""

LATE_GAP = 1024
MIN_DECODE_GAP = 16
"""Nearer checkpoints save less than restoring one costs."""

DECODE_SHARE = 0.01
"""Share of decode time that snapshots may take."""

FINAL_TOKENS = 64
"""An answer's end gets a checkpoint if so many tokens were generated since the last one."""

UNMEASURED = Costs()


def prefill_cuts(
    total: int,
    cached: int,
    matched: int,
    boundaries: Sequence[int],
    costs: Costs,
    most: int | None = None,
    parted: bool = False,
) -> tuple[int, ...]:
    """Where to cut the prefill of tokens [cached, total) and take a checkpoint; ascending, at most `most`.

    `boundaries`: ascending positions where a message, or a marked part of one, starts. The prompt's end is
    no cut. In order of worth: the deepest boundary (with a chat template that is where stripped thinking
    diverges), the branch point `matched`, the last message (another question may follow the same text), the
    first boundary (the system prompt's end), the messages before the last, then the ladder. Batch boundaries
    that the prefill passes anyway come on top: they cost no batch. So does, once, the branch point where
    histories have `parted` before: more of them will (a few-shot prompt), and
    each would decode again the few tokens between the message's start and what differs.
    """
    left = total - cached
    room = left if most is None else most
    known = (matched,) if parted and cached < matched < total and room else ()
    count = min(room - len(known), _affordable(left, costs))
    paid = known + _take(_candidates(total, matched, boundaries), cached, total, count, known)
    free: tuple[int, ...] = ()
    if left >= LONG_SUFFIX:
        free = _take(_batch_ends(total, costs), cached, total, room - len(paid), paid)
    return tuple(sorted(paid + free))


def next_decode_checkpoint(position: int, frontier: int, costs: Costs) -> int:
    """The position of the next checkpoint while generating, on an absolute grid.

    `position`: tokens of the sequence now. `frontier`: where this request's generation began. Gaps follow
    `DECODE_GAPS`, or the cost of a snapshot where that allows nearer ones.
    """
    generated = position - frontier
    gap = next((gap for below, gap in DECODE_GAPS if generated < below), LATE_GAP)
    if (cheap := _cheap_gap(costs)) is not None:
        # Powers of two, so that the grid of one gap lies on the grids of all smaller ones.
        gap = min(gap, 1 << (max(MIN_DECODE_GAP, cheap) - 1).bit_length())
    return (position // gap + 1) * gap


def final_due(generated: int, costs: Costs = UNMEASURED) -> bool:
    """Whether an answer's end gets a checkpoint; `generated`: tokens since the last checkpoint."""
    cheap = _cheap_gap(costs)
    return generated >= (FINAL_TOKENS if cheap is None else min(FINAL_TOKENS, cheap))


def tip_due(left: int) -> bool:
    """Whether the live tip gets a checkpoint before `left` more prompt tokens are decoded behind it.

    There a turn begins: an edited message diverges from it. It is a restore point without a batch of its own.
    """
    return left >= MIN_SPACING


def _cheap_gap(costs: Costs) -> int | None:
    """Tokens between snapshots that keep them within `DECODE_SHARE`; None while not measured."""
    if not costs.token_seconds or not costs.snapshot_seconds:
        return None
    return math.ceil(costs.snapshot_seconds / (DECODE_SHARE * costs.token_seconds))


def _affordable(left: int, costs: Costs) -> int:
    """How many cuts a prefill of `left` tokens may have."""
    if left < ONE_CUT:
        return 1
    if left < SHORT_SUFFIX:
        return _within(SHORT_SHARE, left, costs, most=SHORT_CUTS, unmeasured=SHORT_CUTS)
    if left < LONG_SUFFIX:
        return MEDIUM_CUTS
    return _within(LONG_SHARE, left, costs, most=MAX_CUTS, unmeasured=left // UNMEASURED_TOKENS_PER_CUT)


def _within(share: float, left: int, costs: Costs, most: int, unmeasured: int) -> int:
    """How many cuts cost no more than `share` of the prefill, within 1 and `most`."""
    count = unmeasured
    if costs.token_seconds and costs.prefill_seconds:
        # A cut adds about one small batch, which takes as long as a token decoded alone.
        each = costs.token_seconds + costs.snapshot_seconds
        count = int(share * left * costs.prefill_seconds / each)
    return max(1, min(most, count))


def _candidates(total: int, matched: int, boundaries: Sequence[int]) -> Iterator[int]:
    """Positions worth a cut, the best first."""
    inside = [b for b in boundaries if 0 < b < total]
    distance, grid = TURN_END
    yield inside[-1] if inside else (total - distance) // grid * grid
    yield matched
    yield from inside[-2:-1]
    yield from inside[:1]
    yield from inside[-3 : -2 - RECENT_STARTS : -1]
    for distance, grid in LADDER:
        yield (total - distance) // grid * grid


def _batch_ends(total: int, costs: Costs) -> Iterator[int]:
    """Absolute multiples of the batch size, the distance from the end doubling each time."""
    step = costs.batch_tokens * math.ceil(FREE_GRID / costs.batch_tokens)
    distance = step
    while distance < total:
        yield (total - distance) // step * step
        distance *= 2


def _take(
    candidates: Iterator[int], cached: int, total: int, count: int, taken: tuple[int, ...]
) -> tuple[int, ...]:
    """The first `count` candidates inside (cached, total) that keep their distance from all others."""
    chosen: list[int] = []
    for position in candidates:
        if len(chosen) == count:
            break
        near = any(abs(position - other) < MIN_SPACING for other in (*taken, *chosen, cached))
        if cached < position < total and not near:
            chosen.append(position)
    return tuple(chosen)
