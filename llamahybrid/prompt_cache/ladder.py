"""The ladder: cuts whose distance from a prompt's end grows by a ratio, so that a loss is bounded by it.

No length of a question is the usual one: how far before the end the next history parts is taken to be
log-uniform. Rungs a `ratio` apart then lose the least for their number, in the mean and at worst: a history
that parts d tokens before the end decodes at most (ratio - 1) * d + `GRAIN` known tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SPACING = 8
"""Cuts nearer than this to one another, or to the restore point, save less than their small batch costs."""

GRAIN = 3 * MIN_SPACING
"""Most tokens that grid and spacing add to a loss."""

NEAREST = 4
"""Tokens before the end where the ladder begins: what asks for an answer is a few tokens long, and the next
history often differs there."""

RATIOS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
"""Few and far between, so that costs that were measured a little differently make the same cuts."""

MARKED = 4.0
"""The finest ratio where message starts are known: most histories part there, and each rung takes bytes."""

MARKED_ENDS = 2.0
"""Likewise for batch boundaries."""


def ladder(
    total: int, cached: int, most: int, taken: Sequence[int] = (), finest: float = RATIOS[0]
) -> tuple[int, ...]:
    """At most `most` cuts of tokens [cached, total) that make, with those `taken`, the finest ladder."""
    if most <= 0:
        return ()
    ladders = (rungs(total, cached, ratio, taken) for ratio in RATIOS if ratio >= finest)
    return next((r for r in ladders if len(r) <= most), rungs(total, cached, RATIOS[-1], taken)[:most])


def rungs(total: int, cached: int, ratio: float, taken: Sequence[int] = ()) -> tuple[int, ...]:
    """Cuts that, with those `taken`, lie at most `ratio` apart; the nearest to the end first.

    Each is as far from the end as it may be, on a grid of a power of two, so that prompts of almost the same
    length are cut alike.
    """
    distances = sorted(total - t for t in taken)
    found: list[int] = []
    last = 0
    while True:
        reach = max(int(last * ratio), last + 2 * MIN_SPACING - 1) if last else NEAREST + MIN_SPACING - 1
        if reach > total - cached - MIN_SPACING:
            return tuple(found)
        there = [d for d in distances if last < d <= reach]
        if there:
            last = there[-1]
            continue
        grid = max(MIN_SPACING, 1 << (((reach - last) // 2).bit_length() - 1))
        position = -(-(total - reach) // grid) * grid
        beside = [d for d in distances if abs(d - (total - position)) < MIN_SPACING]
        last = max(*beside, total - position) if beside else total - position
        if not beside:
            found.append(position)


def batch_ends(
    total: int,
    cached: int,
    step: int,
    most: int,
    taken: Sequence[int] = (),
    finest: float = RATIOS[0],
) -> tuple[int, ...]:
    """Batch boundaries, multiples of `step`, that the prefill of [cached, total) passes; at most `most`.

    They cost no batch, only their bytes. The nearest to the end, then each `finest` times as far or the next
    one behind it; farther apart where `most` says so. None beside those `taken`.
    """
    if total - cached <= step:
        return ()
    found: tuple[int, ...] = ()
    for ratio in (r for r in RATIOS if r >= finest):
        found = tuple(
            end
            for end in _ends(total, cached, step, ratio)
            if all(abs(end - other) >= MIN_SPACING for other in taken)
        )
        if len(found) <= most:
            return found
    return found[: max(0, most)]


def _ends(total: int, cached: int, step: int, ratio: float) -> Sequence[int]:
    ends = []
    end = (total - MIN_SPACING) // step * step
    while end >= cached + MIN_SPACING:
        ends.append(end)
        farther = -(-(total - int((total - end) * ratio)) // step) * step
        end = min(end - step, farther)
    return ends
