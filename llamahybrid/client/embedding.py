"""Embeddings: of a model that chats, in a context beside its chats; else upstream's, mended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import llama_cpp
from llama_cpp import LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_RANK
from llama_cpp._internals import normalize_embedding

from llamahybrid.client.extras import StandIn
from llamahybrid.client.requests import Requests
from llamahybrid.memory.vectors import Vectors


class _Ranking(StandIn):
    """Stands for a reranker: upstream reads `n_embd` numbers where a vector has `n_cls_out`."""

    def n_embd(self) -> int:
        """Numbers of a vector."""
        return int(min(self._llm.n_embd(), llama_cpp.llama_model_n_cls_out(self._llm.model)))


def embedded_alone(llm: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of upstream's `embed` in the context of the model, which has no chats."""
    embed: Callable[..., Any] = llama_cpp.Llama.embed
    pooling = llama_cpp.Llama.pooling_type(llm) if llm.embeds else None
    if pooling == LLAMA_POOLING_TYPE_NONE:
        return _one_by_one(partial(embed, llm), *args, **kwargs)
    return embed(_Ranking(llm) if pooling == LLAMA_POOLING_TYPE_RANK else llm, *args, **kwargs)


def _one_by_one(
    embed: Callable[..., Any],
    input: str | Iterable[str],
    normalize: bool = False,
    truncate: bool = True,
    return_count: bool = False,
) -> Any:
    """The result of `embed`, upstream's, of one text after the other.

    Of a batch of several upstream takes the vectors of all but the first from an offset in tokens, where the
    offset is in numbers (llama_cpp/llama.py, Llama.embed: `pos += size`).
    """
    if isinstance(input, str):
        return embed(input, normalize, truncate, return_count)
    made = [embed(text, normalize, truncate, True) for text in input]
    vectors = [each for each, _ in made]
    return (vectors, sum(count for _, count in made)) if return_count else vectors


def embedded_beside(
    vectors: Vectors,
    requests: Requests,
    tokenize: Callable[[bytes], list[int]],
    input: str | Iterable[str],
    normalize: bool = False,
    truncate: bool = True,
    return_count: bool = False,
) -> Any:
    """The result of upstream's `embed`, made beside the chats: between two of their batches.

    Raises ValueError for a text of more tokens than a batch has where it is not to be cut off,
    RequestCancelled, ModelClosed, and as `Vectors.embed`.
    """
    counts: list[int] = []

    def tokens() -> Iterator[list[int]]:
        for text in [input] if isinstance(input, str) else input:
            ids = tokenize(text.encode("utf-8"))
            ids = ids[: vectors.n_batch] if truncate else ids
            if len(ids) > vectors.n_batch:
                raise ValueError(f"Requested tokens ({len(ids)}) exceed batch size of {vectors.n_batch}")
            counts.append(len(ids))
            yield ids

    work = (partial(vectors.embed, batch) for batch in vectors.batches(tokens()))
    made = [vector for batch in requests.beside(work) for vector in batch]
    if normalize:
        made = [_normalized(each, vectors.pooling) for each in made]
    output = made[0] if isinstance(input, str) else made
    return (output, sum(counts)) if return_count else output


def _normalized(made: list[Any], pooling: int) -> list[Any]:
    if pooling == LLAMA_POOLING_TYPE_NONE:
        return [normalize_embedding(row) for row in made]
    vector: list[Any] = normalize_embedding(made)
    return vector
