"""Probes: situations in which a libllama may fail, the known verdicts, and the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from llamahybrid.harness.hazards.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from llamahybrid.harness.hazards.model import ModelUnderTest


Run: TypeAlias = "Callable[[ModelUnderTest], Outcome]"


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
"""Verdicts of a control: stock's, and the patched library's."""
MENDED = (Verdict.WRONG, Verdict.EXACT)
"""Stock is wrong, the patched library exact."""


@dataclass(frozen=True)
class Probe:
    """A situation; `run` sets it up and returns the outcome."""

    id: str
    title: str
    done: str
    """The steps."""
    site: str
    """File and function of the fault in llama.cpp as of llama-cpp-python 0.3.36."""
    sound: str
    """Behaviour of a sound library."""
    patches: tuple[str, ...]
    """Numbers of our patches that fix it; none for a control, which stock passes."""
    stock: Verdict
    """Verdict on llama-cpp-python 0.3.36 with `model`, on the CPU."""
    patched: Verdict
    """Verdict with our patches, on `model` and on each of `also`."""
    says: str
    """Exact detail of that outcome: positions, return values and statuses."""
    run: Run
    model: Model = QWEN35
    also: Mapping[Model, Verdict] = field(default_factory=dict)
    """Other known models, and the verdict on stock."""
    otherwise: Mapping[Model, tuple[Verdict, str]] = field(default_factory=dict)
    """Another verdict and detail with our patches, for some of `also`."""

    @property
    def known(self) -> Mapping[Model, Verdict]:
        """Every known model, and the verdict on stock."""
        return {self.model: self.stock, **self.also}

    def mended(self, model: Model) -> tuple[Verdict, str]:
        """Return verdict and detail on one of `known` with our patches."""
        return self.otherwise.get(model, (self.patched, self.says))


def on(verdict: Verdict, *models: Model | str) -> dict[Model, Verdict]:
    """Return the `also` of a probe with one `verdict` on stock for all `models` (names: without a window)."""
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
    """Make a probe of a function, whose name is the id and whose docstring has the steps.

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
    """Return the probes among a module's names, in their order."""
    return tuple(value for value in module.values() if isinstance(value, Probe))
