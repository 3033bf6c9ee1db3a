"""The hazard catalogue's probes on models that `tiny` does not make: an indexer, cells that are shared."""

from __future__ import annotations

import pytest

from llamahybrid.harness.hazards.catalogue import find

WINDOWS = ("window-without-attention", "cut-behind-window", "copy-behind-window")
CASES = [
    *(
        (name, arch)
        for arch in ("dots3note", "gemma4")
        for name in (*WINDOWS, "empty-state", "nan-in-attention")
    ),
    *(("empty-state", arch) for arch in ("deepseek32", "minimax-m3")),
]


@pytest.mark.parametrize(("probe_id", "arch"), CASES)
def test_probes_have_their_outcome_on_more_models(catalogued, more_model, probe_id, arch):
    probe, outcome = find(probe_id), catalogued(probe_id, more_model(arch))
    known = probe.known[probe.model]
    assert (outcome.behaviour, outcome.detail) == (known.patched, known.says)
