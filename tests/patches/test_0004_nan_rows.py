"""0004: a recurrent row that held NaN is clean again for the next sequence that starts in it."""

from __future__ import annotations

import numpy as np
import pytest
from capi import EXACT, PARTIAL, Context, continued, lib

FLASH = {"flash_attn_type": 1}


def poisoned(path):
    context = Context(path, **FLASH)
    context.feed(0, 12)
    snapshot = bytearray(context.save(flags=PARTIAL))
    snapshot[-4000:] = np.full(1000, np.nan, np.float32).tobytes()
    assert context.load(bytes(snapshot), flags=PARTIAL)
    context.feed(12, 13)
    assert np.isnan(context.logits()).any()
    assert context.rm(0, -1, -1)
    context.feed(0, 12)
    removed = continued(context, path, 12, **FLASH)
    lib.llama_memory_clear(context.memory, False)
    context.feed(0, 12)
    return removed, continued(context, path, 12, **FLASH)


@pytest.mark.parametrize("arch", ["mamba", "qwen35"])
def test_a_removed_sequence_leaves_no_nan(run, tiny_model, arch):
    removed, cleared = run(poisoned, tiny_model(arch))
    assert removed < EXACT
    assert cleared < EXACT
