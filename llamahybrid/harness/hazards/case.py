"""Probes: situations in which a libllama may fail, their models, and the known outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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

    @property
    def name(self) -> str:
        """Short name, usable for a file, and in known.txt."""
        return f"{self.arch}-window{self.window}" if self.window else self.arch

    @classmethod
    def named(cls, name: str) -> Model:
        """Return the model of a name."""
        arch, _, window = name.partition("-window")
        return cls(arch, int(window) if window else None)


@dataclass(frozen=True)
class Known:
    """The outcome of a probe on a model, with llama-cpp-python 0.3.36 on the CPU."""

    stock: Verdict
    patched: Verdict
    """With our patches."""
    says: str
    """Exact detail with our patches: positions, return values and statuses."""


@dataclass(frozen=True)
class Probe:
    """A situation; `run` sets it up and returns the outcome."""

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
        """Numbers of our patches that mend it; none for a control, which stock passes."""
        return table()[self.id][0]

    @property
    def known(self) -> Mapping[Model, Known]:
        """Every known model, the default first, and its outcome."""
        return table()[self.id][1]

    @property
    def model(self) -> Model:
        """The default."""
        return next(iter(self.known))


def probe(title: str, site: str) -> Callable[[Run], Probe]:
    """Make a probe of a function, whose name is the id and whose docstring has the steps."""
    return lambda run: Probe(title, run, site)


@cache
def table() -> dict[str, tuple[tuple[str, ...], dict[Model, Known]]]:
    """Return patches and known outcomes by the id of a probe."""
    found: dict[str, tuple[tuple[str, ...], dict[Model, Known]]] = {}
    for name, patches, models, stock, patched, says in _rows():
        if name:
            numbers = () if patches == "-" else tuple(patches.split())
            outcomes = found.setdefault(name, (numbers, {}))[1]
            mended = Verdict[patched.upper()], says
        here = (Verdict[patched.upper()], says) if patched else mended
        outcomes |= {Model.named(each): Known(Verdict[stock.upper()], *here) for each in models.split()}
    return found


def _rows() -> Iterator[list[str]]:
    text = (Path(__file__).parent / "known.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            cells = [cell.strip() for cell in line.split("|")]
            yield cells + [""] * (6 - len(cells))
