"""The ladder: cuts at growing distances from a prompt's end, for histories that part anywhere.

No length of a question is the usual one: the distance d from the end at which the next history parts is
taken to be log-uniform. Such a history resumes from the nearest cut that is at least d from the end, and
decodes the tokens between again. A ladder loses the least of that in the mean, relative to d, for its number
of cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MIN_SPACING = 8
"""Cuts nearer than this to one another, or to the restore point, save less than their small batch costs."""

NEAREST = 8
"""Shortest distance at which histories are taken to part: nearer ones lose few tokens."""

COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Numbers of cuts of a ladder: few, so that costs measured a little differently make the same one."""

PER_OCTAVE = 4
"""Places between a distance and twice that."""

RATIOS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
"""Distances of rungs and of batch boundaries, in times of one another. Few and far between, so that costs
that were measured a little differently make the same cuts."""

MARKED = 4.0
"""The finest ratio of rungs: each takes bytes, and most histories part at message starts."""

MARKED_ENDS = 2.0
"""Likewise for batch boundaries."""

GRAIN = 3 * MIN_SPACING
"""Most tokens that grid and spacing of rungs add to a loss."""

FIRST_RUNG = 4
"""Tokens before the end where rungs begin: what asks for an answer is a few tokens long, and the next history
often differs there."""


@lru_cache(maxsize=64)
def ladder(total: int, cached: int, most: int, taken: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return at most `most` cuts of [cached, total) that lose least beside those `taken`; descending."""
    far = total - cached
    most = max((count for count in COUNTS if count <= most), default=0)
    free = sorted({total - t for t in taken if NEAREST < total - t < far})
    places = [d for d in _places(total, cached) if all(abs(total - d - t) >= MIN_SPACING for t in taken)]
    if not most or not places:
        return ()
    distances = sorted((*free, *places, far))
    loss = _losses(np.array([NEAREST, *distances], np.float64), np.isin([NEAREST, *distances], free))
    for number, distance in enumerate(distances, 1):
        if distance in free:  # a history in front of it resumes there
            loss[:number, number + 1 :] = np.inf
    paid = np.isin(distances, places)
    return tuple(total - distances[number - 1] for number in _least(loss, paid, most))


def _places(total: int, cached: int) -> list[int]:
    """Distances of possible cuts, on a grid of a power of two, so that prompts of almost the same length are
    cut alike."""
    found: list[int] = []
    position = (total - NEAREST - 1) // MIN_SPACING * MIN_SPACING
    while position >= cached + MIN_SPACING:
        distance = total - position
        found.append(distance)
        grid = max(MIN_SPACING, 1 << (distance // PER_OCTAVE).bit_length() - 1)
        position = (position - 1) // grid * grid
    return found


def _losses(distances: NDArray[np.float64], free: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the loss between each two distances a < b, with no cut between, shape (n, n); inf elsewhere.

    The loss is the integral of (b - d) / d over log d from a to b: b / a - 1 - log(b / a). Only `free` places
    may be near each other.
    """
    ratio = distances[np.newaxis] / distances[:, np.newaxis]
    near = distances[np.newaxis] - distances[:, np.newaxis] < MIN_SPACING
    near[0] = near[:, -1] = False
    near &= ~(free[np.newaxis] & free[:, np.newaxis])
    backward = np.tri(len(distances), dtype=bool)
    loss: NDArray[np.float64] = np.where(backward | near, np.inf, ratio - 1 - np.log(ratio))
    return loss


def _least(loss: NDArray[np.float64], paid: NDArray[np.bool_], most: int) -> list[int]:
    """Return the `paid` places on the path of least loss from the first place to the last, at most `most`.

    By dynamic programming over places and numbers of cuts.
    """
    places = len(loss)
    best = np.full((most + 1, places), np.inf)  # [cuts so far, place]
    best[:, 0] = 0.0
    before = np.zeros((most + 1, places), np.intp)
    for place in range(1, places):
        reached = best[:, :place] + loss[:place, place]
        nearest = reached.argmin(1)
        value = np.take_along_axis(reached, nearest[:, np.newaxis], 1)[:, 0]
        cost = int(place < places - 1 and paid[place - 1])
        best[cost:, place], before[cost:, place] = value[: most + 1 - cost], nearest[: most + 1 - cost]
    path: list[int] = []
    cuts, place = most, int(before[most, -1])
    while place:
        came = int(before[cuts, place])
        if paid[place - 1]:
            path.append(place)
            cuts -= 1
        place = came
    return path[::-1]


def bounding_rungs(
    total: int, cached: int, most: int, taken: Sequence[int], finest: float = RATIOS[0]
) -> tuple[int, ...]:
    """Return at most `most` rungs of the finest ratio that so few make, not finer than `finest`.

    They bound what a history loses that parts anywhere: for prompts whose mean loss is that of their message
    starts, or of what others evict.
    """
    if most <= 0:
        return ()
    ladders = (rungs(total, cached, ratio, taken) for ratio in RATIOS if ratio >= finest)
    return next((r for r in ladders if len(r) <= most), rungs(total, cached, RATIOS[-1], taken)[:most])


def rungs(total: int, cached: int, ratio: float, taken: Sequence[int] = ()) -> tuple[int, ...]:
    """Return cuts that, with those `taken`, lie at most `ratio` apart; the nearest to the end first.

    A history that parts d tokens before the end decodes at most (ratio - 1) * d + `GRAIN` known tokens again.
    Each rung is as far from the end as it may be, on a grid of a power of two.
    """
    distances = sorted(total - t for t in taken)
    found: list[int] = []
    last = 0
    while True:
        reach = max(int(last * ratio), last + 2 * MIN_SPACING - 1) if last else FIRST_RUNG + MIN_SPACING - 1
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
