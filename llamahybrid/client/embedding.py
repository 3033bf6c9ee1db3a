"""Embeddings of several texts, where upstream reads those of single tokens from the wrong place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llama_cpp import LLAMA_POOLING_TYPE_NONE


def embedded(
    embed: Callable[..., Any],
    pooling: int,
    input: str | Iterable[str],
    normalize: bool = False,
    truncate: bool = True,
    return_count: bool = False,
) -> Any:
    """The result of `embed`, upstream's; without pooling, of one text after the other.

    Of a batch of several upstream takes the vectors of all but the first from an offset in tokens, where the
    offset is in numbers (llama_cpp/llama.py, Llama.embed: `pos += size`).
    """
    if isinstance(input, str) or pooling != LLAMA_POOLING_TYPE_NONE:
        return embed(input, normalize, truncate, return_count)
    made = [embed(text, normalize, truncate, True) for text in input]
    vectors = [each for each, _ in made]
    return (vectors, sum(count for _, count in made)) if return_count else vectors
