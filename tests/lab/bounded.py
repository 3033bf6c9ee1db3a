"""Bounded: upstream's `Llama`, that keeps to `max_tokens` where a character is unfinished, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llama_cpp


class Bounded(llama_cpp.Llama):  # type: ignore[misc]
    """What a fresh context of upstream's says, up to the end that was asked for."""

    def _create_completion(self, *args: Any, **asked: Any) -> Iterator[Any]:
        (made,) = super()._create_completion(*args, **asked)
        if asked["max_tokens"] and made["usage"]["completion_tokens"] > asked["max_tokens"]:
            full = made["usage"]["prompt_tokens"] + asked["max_tokens"]
            asked["stopping_criteria"] = llama_cpp.StoppingCriteriaList([lambda ids, _: len(ids) >= full])
            self.reset()
            (made,) = super()._create_completion(*args, **asked)
            made["choices"][0]["finish_reason"] = "length"
        yield made
