"""What a probe is, and what it can find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from llamahybrid.hazards.bench import Bench, Gap


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


def went_on(gap: Gap | None, said: str) -> Outcome:
    """The library said yes (`said` is what it said) and went on with logits `gap` off a clean run's.

    None: it refused to go on, so the damage was noticed.
    """
    if gap is None:
        return Outcome(Verdict.REFUSED, f"{said}; the next decode was refused")
    verdict = Verdict.EXACT if gap.exact else Verdict.WRONG
    return Outcome(verdict, said if gap.finite else f"{said}; logits are not finite", gap.reported)


def refused(gap: Gap | None, said: str) -> Outcome:
    """The library said no; `gap` is how far off it goes on from where it was before it was asked.

    None: it does not go on at all. That is clean, but the live state is lost.
    """
    if gap is None:
        return Outcome(Verdict.REFUSED, f"{said}; the live state was lost")
    if gap.exact:
        return Outcome(Verdict.REFUSED, said, gap.reported)
    return Outcome(Verdict.WRONG, f"{said}, but the live state was damaged", gap.reported)


Run: TypeAlias = "Callable[[Bench], Outcome]"


@dataclass(frozen=True)
class Model:
    """The tiny model a probe runs on."""

    arch: str
    window: int | None = None

    @property
    def name(self) -> str:
        """Short name, usable for a file."""
        return self.arch if self.window is None else f"{self.arch}-window{self.window}"


QWEN35 = Model("qwen35")
"""A hybrid under M-RoPE with rollback planes."""


@dataclass(frozen=True)
class Probe:
    """One situation; `run` brings it about and returns what came of it."""

    id: str
    title: str
    done: str
    """What is done, step by step."""
    site: str
    """Where it goes wrong in llama.cpp as of llama-cpp-python 0.3.36: file and line."""
    sound: str
    """What a sound library does."""
    stock: Verdict
    """What llama-cpp-python 0.3.36 does on `model`, on the CPU."""
    run: Run
    model: Model = QWEN35


def probe(
    id: str, title: str, *, site: str, sound: str, stock: Verdict, model: Model = QWEN35
) -> Callable[[Run], Probe]:
    """Make a probe of a function; its docstring says what is done."""

    def make(run: Run) -> Probe:
        return Probe(id, title, " ".join((run.__doc__ or "").split()), site, sound, stock, run, model)

    return make
