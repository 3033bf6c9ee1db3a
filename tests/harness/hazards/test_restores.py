"""Files, states that do not fit, shared cells, no memory: what the engine of this run makes of them."""

from __future__ import annotations

from llamahybrid.harness.hazards.restores import PROBES
from tests.harness.hazards.verdicts import known_of

test_it_does_what_is_known_of_it = known_of(PROBES)
