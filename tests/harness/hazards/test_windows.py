"""Sliding windows: what the engine of this run makes of cuts and restores."""

from __future__ import annotations

from llamahybrid.harness.hazards.windows import PROBES
from tests.harness.hazards.verdicts import known_of

test_it_does_what_is_known_of_it = known_of(PROBES)
