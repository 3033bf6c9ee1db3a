"""All probes, in the order in which they are shown."""

from __future__ import annotations

from llamahybrid.harness.hazards import (
    aborts,
    batches,
    copies,
    crashes,
    devices,
    nan,
    restores,
    rollback,
    state_blobs,
    windows,
)
from llamahybrid.harness.hazards.case import Probe

PROBES: tuple[Probe, ...] = (
    *rollback.PROBES,
    *copies.PROBES,
    *batches.PROBES,
    *windows.PROBES,
    *aborts.PROBES,
    *nan.PROBES,
    *state_blobs.PROBES,
    *restores.PROBES,
    *devices.PROBES,
    *crashes.PROBES,
)


def find(name: str) -> Probe:
    """The probe whose id is `name`; raises ValueError when there is none."""
    for probe in PROBES:
        if probe.id == name:
            return probe
    raise ValueError(f"no probe called {name}; there are: {', '.join(probe.id for probe in PROBES)}")
