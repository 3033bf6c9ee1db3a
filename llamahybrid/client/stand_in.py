"""StandIn: an object that upstream takes for the `Llama`, with some of its methods replaced."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Stands for a `Llama`; attributes that a subclass does not define are those of the model."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)
