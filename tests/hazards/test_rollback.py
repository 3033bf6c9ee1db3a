"""Rollback planes: which cuts the engine of this run grants, and whether it goes on right."""

from __future__ import annotations

from llamahybrid.hazards.rollback import PROBES
from tests.hazards.verdicts import known_of

test_it_does_what_is_known_of_it = known_of(PROBES)
