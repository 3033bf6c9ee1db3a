"""The demo: its table, its line, and whether it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamahybrid.evaluate import demo
from llamahybrid.evaluate.compare import Comparer, Comparison, Side


@pytest.fixture(scope="module")
def probed(tiny_model: Callable[..., Path]) -> Comparison:
    """The demo's chat on a tiny model."""
    options = {"n_threads": 1, "n_threads_batch": 1}
    return Comparer(tiny_model("qwen35"), options).run(replace(demo.DEMO, n_ctx=8192))


def test_the_demo_holds(probed: Comparison) -> None:
    assert demo.holds(probed)
    assert len(probed.ours.records) == 8
    assert probed.ours.decoded < probed.stock.decoded
    assert f"{probed.ours.decoded:,}" in demo.summary(probed)
    columns = demo.turn_table(probed).columns
    assert [list(column.cells) for column in columns[3:5]] == [
        [str(record.decoded) for record in side.records] for side in (probed.stock, probed.ours)
    ]


def test_the_demo_fails_when_a_text_differs(probed: Comparison) -> None:
    *rest, last = probed.ours.records
    wrong = replace(last, generated=(*last.generated[:-1], last.generated[-1] + 1))
    differs = replace(probed, ours=Side([*rest, wrong], 0))
    assert not demo.holds(differs)
    assert ["no" in cell for cell in demo.turn_table(differs).columns[-1].cells] == [False] * 7 + [True]


def test_the_demo_fails_when_one_turn_decodes_more_than_stock(probed: Comparison) -> None:
    first, *rest = probed.ours.records
    assert not demo.holds(replace(probed, ours=Side([replace(first, decoded=first.decoded + 1), *rest], 0)))
