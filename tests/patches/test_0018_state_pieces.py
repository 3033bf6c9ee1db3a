"""0018: a piece of a split tensor is whole rows, one at least, however long a row is."""

from __future__ import annotations

import more_models

from llamahybrid.harness.hazards import devices
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.harness.hazards.outcome import NotApplicable

BUFFER = 1 << 20


def long_rows(path):
    """States in pieces, with rows of a split tensor that do not fit the buffer."""
    try:
        context, _ = devices._split(ModelUnderTest(path), 40)
        outcome = devices._in_pieces(context, 10, 30)
    except NotApplicable as missing:
        return "not applicable", str(missing)
    return outcome.verdict.value, outcome.detail


def test_a_row_that_is_longer_than_the_buffer_is_a_piece(run, tmp_path):
    verdict, detail = run(long_rows, more_models.make_long_rows(tmp_path / "long.gguf"))
    assert verdict == "exact", detail
    assert int(detail.split()[-1]) == 2 * BUFFER
