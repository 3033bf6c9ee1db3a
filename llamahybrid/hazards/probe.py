"""What a probe is, and what it can find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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


Run: TypeAlias = "Callable[[Bench], Outcome]"


@dataclass(frozen=True)
class Model:
    """The tiny model a probe runs on."""

    arch: str
    window: int | None = None
    embd: int | None = None
    """Width of the embedding; None: that of `tiny`."""

    @property
    def name(self) -> str:
        """Short name, usable for a file."""
        parts = [f"{name}{value}" for name in ("window", "embd") if (value := getattr(self, name))]
        return "-".join([self.arch, *parts])


QWEN35 = Model("qwen35")
"""A hybrid under M-RoPE with rollback planes."""
LLAMA = Model("llama")
"""Plain attention."""
GEMMA3 = Model("gemma3", 16)
"""Attention with and without a sliding window."""
LFM2 = Model("lfm2", 16)
"""A hybrid whose attention has a sliding window."""


@dataclass(frozen=True)
class Probe:
    """One situation; `run` brings it about and returns what came of it."""

    id: str
    title: str
    done: str
    """What is done, step by step."""
    site: str
    """Where it goes wrong in llama.cpp as of llama-cpp-python 0.3.36: file and function."""
    sound: str
    """What a sound library does."""
    patches: tuple[str, ...]
    """Numbers of the patches of our series that mend it; none for a control, which stock passes."""
    stock: Verdict
    """What llama-cpp-python 0.3.36 does on `model`, on the CPU."""
    patched: Verdict
    """What it does with our patches, on `model` and on each of `also`."""
    says: str
    """The detail of that outcome: positions, return values and statuses, to the letter."""
    run: Run
    model: Model = QWEN35
    also: Mapping[Model, Verdict] = field(default_factory=dict)
    """Other models that are known, and what stock does on them."""
    otherwise: Mapping[Model, tuple[Verdict, str]] = field(default_factory=dict)
    """Those of `also` on which our patches bring another verdict or detail, and which."""

    @property
    def known(self) -> Mapping[Model, Verdict]:
        """Every model that is known, and what stock does on it."""
        return {self.model: self.stock, **self.also}

    def mended(self, model: Model) -> tuple[Verdict, str]:
        """Verdict and detail on one of `known` with our patches."""
        return self.otherwise.get(model, (self.patched, self.says))


def on(verdict: Verdict, *models: Model | str) -> dict[Model, Verdict]:
    """`also` of a probe whose verdict on stock is `verdict` on each of `models` (names: without a window)."""
    return {Model(model) if isinstance(model, str) else model: verdict for model in models}


def probe(
    title: str,
    *,
    site: str,
    sound: str,
    verdicts: tuple[Verdict, Verdict],
    says: str,
    patches: tuple[str, ...] = (),
    model: Model = QWEN35,
    also: Mapping[Model, Verdict] | None = None,
    otherwise: Mapping[Model, tuple[Verdict, str]] | None = None,
) -> Callable[[Run], Probe]:
    """Make a probe of a function: its name is the id, its docstring says what is done.

    `verdicts`: stock's, and the patched library's.
    """

    def make(run: Run) -> Probe:
        done = " ".join((run.__doc__ or "").split())
        return Probe(
            run.__name__.replace("_", "-"),
            title,
            done,
            site,
            sound,
            patches,
            *verdicts,
            says,
            run,
            model,
            also or {},
            otherwise or {},
        )

    return make


def probes_in(module: Mapping[str, object]) -> tuple[Probe, ...]:
    """The probes among a module's names, in their order."""
    return tuple(value for value in module.values() if isinstance(value, Probe))
