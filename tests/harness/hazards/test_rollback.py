"""Rollback planes: which cuts the engine of this run grants, and whether it goes on right."""

from __future__ import annotations

from llamahybrid.harness.hazards.rollback import PROBES
from tests.harness.hazards.verdicts import known_of

test_it_does_what_is_known_of_it = known_of(PROBES)
