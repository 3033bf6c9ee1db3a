"""Outcomes of a probe: a verdict, and the distance of logits from a clean run's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Logits: TypeAlias = npt.NDArray[np.float32]


class Verdict(str, Enum):
    """Behaviour of a library in a situation."""

    EXACT = "exact"
    REFUSED = "refused cleanly"
    WRONG = "silently wrong"
    DIED = "process died"
    NOT_APPLICABLE = "not applicable"
    FAILED = "probe failed"
    """The probe could not set up its situation."""

    @property
    def sound(self) -> bool:
        """True if a user of the library is safe."""
        return self in (Verdict.EXACT, Verdict.REFUSED, Verdict.NOT_APPLICABLE)


@dataclass(frozen=True)
class Outcome:
    """The finding of a probe."""

    verdict: Verdict
    detail: str = ""
    difference: float | None = None
    """Largest difference of a logit to a clean run; None: not compared, or not a finite number."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Return the outcome of which JSON has the fields."""
        return cls(Verdict(data["verdict"]), data["detail"], data["difference"])


class NotApplicable(Exception):
    """The situation cannot arise with this model or library, for the reason in the message."""


class Refused(Exception):
    """The library refused a step that the probe needs, which ends the probe."""


def granted(yes: bool, otherwise: str) -> None:
    """Raise `Refused` with `otherwise` as its message unless the library accepted."""
    if not yes:
        raise Refused(otherwise)


@dataclass(frozen=True)
class Gap:
    """Distance of a row of logits from a clean run's."""

    largest: float
    """Largest absolute difference; infinite when a logit is not a number."""
    span: float
    """Range of the clean row."""
    share: float = 1e-4
    """Share of the range within which two clean runs with other batches lie, with a margin."""

    @property
    def exact(self) -> bool:
        """True where it is no larger than that between two clean runs."""
        return self.largest < self.share * self.span

    @property
    def reported(self) -> float | None:
        """The difference; None unless it is finite."""
        return self.largest if math.isfinite(self.largest) else None


def gap(got: Logits, wanted: Logits, share: float = 1e-4) -> Gap:
    """Compare two rows of logits, shape (vocabulary,); `share`: see `Gap`.

    Raises NotApplicable if the clean row is constant.
    """
    if not np.ptp(wanted):
        raise NotApplicable("the model gives no logits in this mode")
    largest = float(np.abs(got - wanted).max()) if np.isfinite(got).all() else math.inf
    return Gap(largest, float(np.ptp(wanted)), share)


def went_on(gap: Gap | int, said: str) -> Outcome:
    """Return the outcome of an accepted call (`said`), after which logits are `gap` off a clean run's.

    An int is the status of a refused llama_decode: the library noticed the damage.
    """
    if isinstance(gap, int):
        return Outcome(Verdict.REFUSED, f"{said}; the next decode returned {gap}")
    verdict = Verdict.EXACT if gap.exact else Verdict.WRONG
    return Outcome(
        verdict, said if gap.reported is not None else f"{said}; logits are not finite", gap.reported
    )


def refused(gap: Gap | int, said: str) -> Outcome:
    """Return the outcome of a refused call, after which logits of the live state are `gap` off.

    An int is the status of a refused llama_decode: a clean refusal that lost the live state.
    """
    if isinstance(gap, int):
        return Outcome(Verdict.REFUSED, f"{said}; the live state was lost, the next decode returned {gap}")
    if gap.exact:
        return Outcome(Verdict.REFUSED, said, gap.reported)
    return Outcome(Verdict.WRONG, f"{said}, but the live state was damaged", gap.reported)


def wrong(said: str) -> Outcome:
    """Return the outcome of a result that no sound library gives."""
    return Outcome(Verdict.WRONG, said)


def all_sound(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the first outcome that is not sound, else the last; later ones are not run.

    A last outcome without a difference gets the largest one before it.
    """
    done: list[Outcome] = []
    for outcome in outcomes:
        done.append(outcome)
        if not outcome.verdict.sound:
            break
    if not done:
        raise ValueError("nothing was tried")
    if done[-1].verdict.sound and done[-1].difference is None:
        known = [outcome.difference for outcome in done if outcome.difference is not None]
        return replace(done[-1], difference=max(known, default=None))
    return done[-1]
