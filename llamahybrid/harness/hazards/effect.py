"""The effect of a situation: the behaviour of a library, and the distance of logits from a clean run's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Logits: TypeAlias = npt.NDArray[np.float32]


class Behaviour(str, Enum):
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
        return self in (Behaviour.EXACT, Behaviour.REFUSED, Behaviour.NOT_APPLICABLE)


@dataclass(frozen=True)
class Effect:
    """The result of a probe."""

    behaviour: Behaviour
    detail: str = ""
    difference: float | None = None
    """Largest difference of a logit to a clean run; None: not compared, or not a finite number."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Effect:
        """Return the effect of which JSON has the fields."""
        return cls(Behaviour(data["behaviour"]), data["detail"], data["difference"])


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


def went_on(gap: Gap | int, said: str) -> Effect:
    """Return the effect of an accepted call (`said`), after which logits are `gap` off a clean run's.

    An int is the status of a refused llama_decode: the library noticed the damage.
    """
    if isinstance(gap, int):
        return Effect(Behaviour.REFUSED, f"{said}; the next decode returned {gap}")
    behaviour = Behaviour.EXACT if gap.exact else Behaviour.WRONG
    return Effect(
        behaviour, said if gap.reported is not None else f"{said}; logits are not finite", gap.reported
    )


def refused(gap: Gap | int, said: str) -> Effect:
    """Return the effect of a refused call, after which logits of the live state are `gap` off.

    An int is the status of a refused llama_decode: a clean refusal that lost the live state.
    """
    if isinstance(gap, int):
        return Effect(Behaviour.REFUSED, f"{said}; the live state was lost, the next decode returned {gap}")
    if gap.exact:
        return Effect(Behaviour.REFUSED, said, gap.reported)
    return Effect(Behaviour.WRONG, f"{said}, but the live state was damaged", gap.reported)


def wrong(said: str) -> Effect:
    """Return the effect of a result that no sound library gives."""
    return Effect(Behaviour.WRONG, said)


def all_sound(effects: Iterable[Effect]) -> Effect:
    """Return the first effect that is not sound, else the last; later ones are not run.

    A last effect without a difference gets the largest one before it.
    """
    done: list[Effect] = []
    for effect in effects:
        done.append(effect)
        if not effect.behaviour.sound:
            break
    if not done:
        raise ValueError("nothing was tried")
    if done[-1].behaviour.sound and done[-1].difference is None:
        known = [effect.difference for effect in done if effect.difference is not None]
        return replace(done[-1], difference=max(known, default=None))
    return done[-1]
