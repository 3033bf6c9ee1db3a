"""A plan's reason in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamahybrid.prompt_cache import Plan
from llamahybrid.prompt_cache.base import Reason
from llamahybrid.request.report import sentence

KNOWN = Plan(2470, 1170, 1000, "ram", None, None, reason=Reason("known"))
WHOLE = replace(KNOWN, total=1170)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan(9, 0, 0, "none", None, None), ""),
        (replace(KNOWN, reason=Reason("unknown")), "nothing in common with anything known"),
        (replace(KNOWN, reason=Reason("extended")), "live sequence extended by 1470 tokens"),
        (replace(KNOWN, reason=Reason("repeated")), "exact prompt repeated: sampling from the live logits"),
        (
            replace(KNOWN, reason=Reason("repeated", stored_logits=True)),
            "exact prompt repeated: sampling from stored logits",
        ),
        (
            KNOWN,
            "history differs at token 1,170 of 2,470; restored at 1,000 from RAM, 170 known tokens lost",
        ),
        (
            replace(KNOWN, source="disk", matched=1001),
            "history differs at token 1,001 of 2,470; restored at 1,000 from disk",
        ),
        (
            replace(KNOWN, source="remote", matched=1001),
            "history differs at token 1,001 of 2,470; restored at 1,000 from the remote store",
        ),
        (
            replace(KNOWN, source="live", matched=1002),
            "history differs at token 1,002 of 2,470; live sequence cut to 1,000, 2 known tokens lost",
        ),
        (
            replace(KNOWN, source="none", cached=0),
            "history differs at token 1,170 of 2,470; no restore point before it, 1,170 known tokens lost",
        ),
        (WHOLE, "whole prompt known; restored at 1,000 from RAM, 170 known tokens lost"),
    ],
)
def test_a_reason_in_words(plan: Plan, told: str) -> None:
    assert sentence(plan) == told


def spell(token: int) -> str:
    return f"<{token}>"


def test_the_token_of_others_is_spelt_only_on_demand() -> None:
    plan = replace(KNOWN, matched=1000, differs=(7, 8))
    head, tail = "history differs at token 1,000 of 2,470", "; restored at 1,000 from RAM"
    assert sentence(plan, spell) == f"{head}, '<7>'{tail}"
    assert sentence(plan, spell, explain=True) == f"{head}: '<7>' was '<8>'{tail}"


@pytest.mark.parametrize("plan", [WHOLE, replace(KNOWN, reason=Reason("extended"))])
def test_a_difference_is_spelt_only_where_the_reason_is_one(plan: Plan) -> None:
    assert sentence(replace(plan, differs=(7, 8)), spell, explain=True) == sentence(plan)


@pytest.mark.parametrize("explain", [False, True])
def test_without_a_speller_no_token_is_named(explain: bool) -> None:
    plan = Plan(10, 7, 5, "ram", None, None, reason=Reason("known"), differs=(7777, 8888))
    told = sentence(plan, None, explain=explain)
    assert told == "history differs at token 7 of 10; restored at 5 from RAM, 2 known tokens lost"
