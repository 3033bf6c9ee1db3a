"""A server under load: a short round of the campaign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.differential import Mismatch
from tests.lab.server_load import TEXT, Load, Plan, campaign, judge

TinyModel = Callable[..., Path]


def test_conversations_crowds_hangups_and_a_kill(tiny_model: TinyModel, tmp_path: Path) -> None:
    plan = Plan(clients=4, turns=4, connections=40, hangups=30, kills=1, judge_every=4)
    load = campaign(tiny_model("qwen35"), tmp_path, plan, 1)
    assert len(load.answers) > 20
    assert load.cached_tokens > 0


def test_an_answer_that_is_none_is_noticed(tiny_model: TinyModel) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 4}
    with pytest.raises(Mismatch):
        judge(tiny_model("qwen35"), Load(answers=[(TEXT, asked, "zzzz")]))
