"""The demo: its table, its line, and whether it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamahybrid.evaluate import demo
from llamahybrid.evaluate.compare import Comparer, Comparison, Side


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The demo's chat on a tiny model."""
    from llamahybrid import tiny

    model = tiny.make("qwen35", tmp_path_factory.mktemp("demo") / "model.gguf")
    return Comparer(model, {"n_threads": 1, "n_threads_batch": 1}).run(replace(demo.DEMO, n_ctx=8192))


def test_the_demo_holds(probed: Comparison) -> None:
    assert demo.holds(probed)
    assert len(probed.ours.records) == 8
    assert probed.ours.decoded < probed.stock.decoded
    assert f"{probed.ours.decoded:,}" in demo.summary(probed)


def test_the_demo_fails_when_a_text_differs(probed: Comparison) -> None:
    *rest, last = probed.ours.records
    wrong = replace(last, generated=(*last.generated[:-1], last.generated[-1] + 1))
    assert not demo.holds(replace(probed, ours=Side([*rest, wrong], 0)))


def test_the_demo_fails_when_one_turn_decodes_more_than_stock(probed: Comparison) -> None:
    first, *rest = probed.ours.records
    assert not demo.holds(replace(probed, ours=Side([replace(first, decoded=first.decoded + 1), *rest], 0)))
