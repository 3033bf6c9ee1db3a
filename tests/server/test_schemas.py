"""How much text the grammar of a JSON schema would take, told before it is written."""

from typing import Any

import pytest

from llamahybrid.server.schemas import MOST_LETTERS, MOST_REPEATS, excess, repeats


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({}, 0),
        ({"type": "string", "minLength": 7, "maxLength": 9}, 16),
        ({"properties": {"a": {"maxItems": 5, "items": {"maxLength": 3}}}}, 8),
        ([{"minItems": 2}, {"anyOf": [{"minItems": 3}]}], 5),
        ({"pattern": "^(a{3}b){10,20}$"}, 60),
        ({"pattern": "x{1000000000}"}, 1e9),
        ({"enum": [{"minLength": 1000}], "default": {"maxItems": 1000}}, 0),
        ({"properties": {"minLength": {"maxLength": 4}}}, 4),
        ({"minLength": "many"}, 0),
    ],
)
def test_lengths_and_repetitions_are_counted(schema: Any, most: float) -> None:
    assert repeats(schema) == most


def test_what_is_too_much_is_told() -> None:
    half = {"enum": ["x" * (MOST_LETTERS // 2)]}
    assert excess(None) is excess({}) is excess(half) is excess([half, half]) is None
    assert "letters" in (excess({"anyOf": [half, half]}) or "")
    assert "letters" in (excess([half, {"enum": list(range(MOST_LETTERS // 3))}]) or "")
    assert "lengths" in (excess([{"minLength": MOST_REPEATS + 1}]) or "")
