"""A server under load: a short round of the campaign."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import llama_cpp
import pytest

from tests.lab.differential import Mismatch
from tests.lab.server_clients import PLAIN, TEXT, Load, Said
from tests.lab.server_load import SETTING, Footprint, Plan, campaign, judge

TinyModel = Callable[..., Path]


@pytest.mark.full
def test_conversations_crowds_hangups_and_a_kill(tiny_model: TinyModel, tmp_path: Path) -> None:
    plan = Plan(clients=4, turns=4, connections=40, requests=60, kills=1, judge_every=4)
    load = campaign(tiny_model("qwen35"), tmp_path, plan, 1)
    assert len(load.answers) > 20
    assert load.cached_tokens > 0


@pytest.mark.parametrize("wrong", ["other", "cut off", "one more", "ended early", "left"])
def test_wrong_answers_are_noticed(tiny_model: TinyModel, wrong: str) -> None:
    model, asked = tiny_model("qwen35"), {"prompt": "Once upon a time", "max_tokens": 4}
    with closing(SETTING.open(llama_cpp.Llama, model)) as llm:
        text = llm.create_completion(**asked, **PLAIN)["choices"][0]["text"]
    right = Said(TEXT, asked, text, 4, "length")
    judge(model, Load(answers=[right, replace(right, text=text[:-1], tokens=0, finish="")]))
    said = {
        "other": replace(right, text="zzzz"),
        "cut off": replace(right, text=text[:-1]),
        "one more": replace(right, text=text + "a", tokens=5),
        "ended early": replace(right, text=text[:-1], tokens=3, finish="stop"),
        "left": replace(right, text="zz", finish=""),
    }[wrong]
    with pytest.raises(Mismatch):
        judge(model, Load(answers=[said]))


def test_growth_is_noticed() -> None:
    before = Footprint(100.0, 20, 10)
    replace(before, mib=101.0, threads=21, files=11).require_level(before)
    for grown in ({"mib": 110.0}, {"threads": 40}, {"files": 30}):
        with pytest.raises(AssertionError, match="grew"):
            replace(before, **grown).require_level(before)
