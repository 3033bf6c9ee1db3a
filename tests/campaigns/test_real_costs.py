"""Costs in a real model's proportions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.real_costs import REAL, RealCosts, with_real_costs

pytestmark = pytest.mark.usefixtures("measured_costs")

TinyModel = Callable[..., Path]


def test_costs_are_those_of_a_real_model_once_something_was_measured() -> None:
    meter = RealCosts(32)
    meter.decoded(1, 5e-6)
    assert meter.costs().token_seconds == 5e-6, "prefill is not known yet"
    meter.decoded(64, 1e-4)
    meter.saved(1000, 1e-6)
    assert meter.costs() == replace(REAL, snapshot_bytes=1000, batch_tokens=32)


def test_with_them_it_decides_as_a_real_model_would(tiny_model: TinyModel) -> None:
    with closing(with_real_costs(model_path=str(tiny_model("qwen35")), n_ctx=256, verbose=False)) as llm:
        assert llm.runner is not None
        assert isinstance(llm.runner.meter, RealCosts)
