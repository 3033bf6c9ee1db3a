"""A model's vocabulary as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llamahybrid.evaluate.speech import Vocabulary

MOST = 4096
"""Words of it: enough to say anything with."""


def known_words(llm: Any) -> dict[str, Any]:
    """Plain data of the vocabulary of an open model."""
    return asdict(Vocabulary.of(llm, MOST))


def from_json(data: dict[str, Any]) -> Vocabulary:
    """What `known_words` gave, after a way through JSON."""
    return Vocabulary(**{**data, "words": tuple(data["words"])})
