"""Numbers that are none: where they stay with the engine of this run."""

from __future__ import annotations

from llamahybrid.harness.hazards.nan import PROBES
from tests.harness.hazards.verdicts import known_of

test_it_does_what_is_known_of_it = known_of(PROBES)
