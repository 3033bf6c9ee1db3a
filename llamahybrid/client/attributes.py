"""Upstream's attributes of `Llama` as those of the request that is meant."""

from __future__ import annotations

from typing import Any


def upstream_attribute(name: str) -> Any:
    """An attribute of `Llama` that is the one of this name of the view that is meant."""

    def get(llm: Any) -> Any:
        return getattr(llm.requests.seen, name)

    def put(llm: Any, value: Any) -> None:
        setattr(llm.requests.own, name, value)

    get.__doc__ = f"`llama_cpp.Llama.{name}` of the calling thread's request."
    return property(get, put)


def upstream_seed() -> Any:
    """`_seed` of `Llama`: in a request its own; elsewhere the next one's, which upstream draws from it."""

    def get(llm: Any) -> int:
        requests = llm.requests
        seed: int = requests.next_seed() if requests.inside is None else requests.inside.view.seed
        return seed

    def put(llm: Any, seed: int) -> None:
        requests = llm.requests
        if not (requests.salted and requests.salt()):
            requests.seed = seed
        if requests.inside is not None:
            requests.inside.view.seed = seed

    return property(get, put)
