"""What a probe is: a situation, what is known of it, and the model it is brought about on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from llamahybrid.harness.hazards.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from llamahybrid.harness.hazards.model import Bench


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

CONTROL = (Verdict.EXACT, Verdict.EXACT)
"""Verdicts of a probe that shows what works: stock's, and the patched library's."""
MENDED = (Verdict.WRONG, Verdict.EXACT)
"""Stock goes on wrong, the patched library right."""


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
