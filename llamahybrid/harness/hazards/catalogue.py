"""All probes, in the order in which they are shown."""

from __future__ import annotations

from llamahybrid.harness.hazards import aborts, copies, crashes, nan, restores, rollback, state_blobs, windows
from llamahybrid.harness.hazards.case import Probe

_FAMILIES = (rollback, copies, windows, aborts, nan, state_blobs, restores, crashes)

PROBES = tuple(each for family in _FAMILIES for each in vars(family).values() if isinstance(each, Probe))


def find(name: str) -> Probe:
    """The probe whose id is `name`; raises ValueError when there is none."""
    for probe in PROBES:
        if probe.id == name:
            return probe
    raise ValueError(f"no probe called {name}; there are: {', '.join(probe.id for probe in PROBES)}")
