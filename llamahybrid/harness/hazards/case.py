"""Probes: situations in which a libllama may fail, their models, and the known effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llamahybrid.harness.hazards.effect import Behaviour, Effect

if TYPE_CHECKING:
    from llamahybrid.harness.hazards.model import ModelUnderTest

Run: TypeAlias = "Callable[[ModelUnderTest], Effect]"


@dataclass(frozen=True)
class Known:
    """The effect of a probe on a model, with llama-cpp-python 0.3.36 on the CPU."""

    stock: Behaviour
    patched: Behaviour
    """With our patches."""
    says: str
    """Exact detail with our patches: positions, return values and statuses."""
    patches: tuple[str, ...]
    """Numbers of our patches that mend it on this model; none for a control, which stock passes."""


@dataclass(frozen=True)
class Probe:
    """A situation; `run` sets it up and returns the effect."""

    title: str
    run: Run
    site: str
    """Function of the fault in llama.cpp as of llama-cpp-python 0.3.36."""

    @property
    def id(self) -> str:
        """The name of `run`."""
        return self.run.__name__.replace("_", "-")

    @property
    def done(self) -> str:
        """The steps, which are the docstring of `run`."""
        return " ".join((self.run.__doc__ or "").split())

    @property
    def patches(self) -> tuple[str, ...]:
        """Numbers of our patches that mend it on any of its models."""
        return tuple(sorted({number for known in self.known.values() for number in known.patches}))

    @property
    def known(self) -> Mapping[str, Known]:
        """The effect by the name of each known model, as in known.txt; the default is first."""
        return table()[self.id]

    @property
    def model(self) -> str:
        """The default."""
        return next(iter(self.known))


def probe(title: str, site: str) -> Callable[[Run], Probe]:
    """Make a probe of a function, whose name is the id and whose docstring has the steps."""
    return lambda run: Probe(title, run, site)


@cache
def table() -> dict[str, dict[str, Known]]:
    """Return known effects by the id of a probe, and by the name of a model."""
    found: dict[str, dict[str, Known]] = {}
    for name, patches, models, stock, patched, says in _rows():
        if name:
            effects = found.setdefault(name, {})
            mended, numbers = (Behaviour[patched.upper()], says), patches
        here = (Behaviour[patched.upper()], says) if patched else mended
        own = tuple((patches or numbers).replace("-", "").split())
        effects |= {each: Known(Behaviour[stock.upper()], *here, own) for each in models.split()}
    return found


def _rows() -> Iterator[list[str]]:
    text = (Path(__file__).parent / "known.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            cells = [cell.strip() for cell in line.split("|")]
            yield cells + [""] * (6 - len(cells))
