"""What can come of a situation: a verdict, and how far logits are off a clean run's."""

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
    """What a library made of a situation."""

    EXACT = "exact"
    REFUSED = "refused cleanly"
    WRONG = "silently wrong"
    DIED = "process died"
    NOT_APPLICABLE = "not applicable"
    FAILED = "probe failed"
    """The probe could not set its situation up, so nothing is known."""

    @property
    def sound(self) -> bool:
        """Whether a user of the library is safe here."""
        return self in (Verdict.EXACT, Verdict.REFUSED, Verdict.NOT_APPLICABLE)


@dataclass(frozen=True)
class Outcome:
    """One probe's finding."""

    verdict: Verdict
    detail: str = ""
    difference: float | None = None
    """Largest difference of a logit to a clean run; None: not compared, or not a finite number."""

    def as_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back."""
        return {"verdict": self.verdict.value, "detail": self.detail, "difference": self.difference}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """The outcome that `as_json` wrote."""
        return cls(Verdict(data["verdict"]), data["detail"], data["difference"])


class NotApplicable(Exception):
    """The situation cannot arise with this model or library; the message says why."""


class Refused(Exception):
    """The library refused what the situation rests on, which ends the probe; the message says what."""


def granted(yes: bool, otherwise: str) -> None:
    """Raise `Refused` with the words of `otherwise` unless the library said yes."""
    if not yes:
        raise Refused(otherwise)


@dataclass(frozen=True)
class Gap:
    """How far a row of logits is off a clean run's."""

    largest: float
    """Largest absolute difference; infinite when a logit is not a number."""
    span: float
    """Range of the clean row."""

    @property
    def finite(self) -> bool:
        """Whether all logits were numbers."""
        return math.isfinite(self.largest)

    @property
    def exact(self) -> bool:
        """As close as two clean runs with other batches are, with a margin."""
        return self.largest < 1e-4 * self.span

    @property
    def reported(self) -> float | None:
        """The difference as JSON can hold it."""
        return self.largest if self.finite else None


def gap(got: Logits, wanted: Logits) -> Gap:
    """Compare two rows of logits, shape (vocabulary,); NotApplicable when the clean row tells nothing."""
    if not np.ptp(wanted):
        raise NotApplicable("the model gives no logits in this mode")
    largest = float(np.abs(got - wanted).max()) if np.isfinite(got).all() else math.inf
    return Gap(largest, float(np.ptp(wanted)))


def went_on(gap: Gap | int, said: str) -> Outcome:
    """The library said yes (`said` is what it said) and went on with logits `gap` off a clean run's.

    A status that llama_decode returned instead: it refused to go on, so the damage was noticed.
    """
    if isinstance(gap, int):
        return Outcome(Verdict.REFUSED, f"{said}; the next decode returned {gap}")
    verdict = Verdict.EXACT if gap.exact else Verdict.WRONG
    return Outcome(verdict, said if gap.finite else f"{said}; logits are not finite", gap.reported)


def refused(gap: Gap | int, said: str) -> Outcome:
    """The library said no; `gap` is how far off it goes on from where it was before it was asked.

    A status that llama_decode returned instead: it does not go on at all. That is clean, but the live state
    is lost.
    """
    if isinstance(gap, int):
        return Outcome(Verdict.REFUSED, f"{said}; the live state was lost, the next decode returned {gap}")
    if gap.exact:
        return Outcome(Verdict.REFUSED, said, gap.reported)
    return Outcome(Verdict.WRONG, f"{said}, but the live state was damaged", gap.reported)


def wrong(said: str) -> Outcome:
    """The library said `said`, which no sound one says."""
    return Outcome(Verdict.WRONG, said)


def all_sound(outcomes: Iterable[Outcome]) -> Outcome:
    """The first outcome that is not sound, else the last; what comes after the first is not done.

    A last outcome without a difference to a clean run shows the largest one before it.
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
