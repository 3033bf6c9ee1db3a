"""StatefulLlama: upstream's `Llama` whose state is that of the request which is meant.

Upstream's own code, chat handlers and hand-made loops read and set attributes, and call `eval`, `sample` and
`reset`: here they act on the calling thread's request (see `Requests`). Without a decode loop all of it is
upstream's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import llama_cpp

from llamahybrid.client.native_calls import NativeCalls
from llamahybrid.client.requests import Requests
from llamahybrid.client.sampling import sampler_for
from llamahybrid.client.saved_state import load, save
from llamahybrid.core.slot import Slot
from llamahybrid.errors import LlamaHybridError
from llamahybrid.prompt_cache.base import Logits
from llamahybrid.signatures import as_of


def upstream_attribute(name: str) -> Any:
    """An attribute of `Llama` that is the one of this name of the view that is meant."""

    def get(llm: Any) -> Any:
        return getattr(llm.requests.seen, name)

    def put(llm: Any, value: Any) -> None:
        setattr(llm.requests.own, name, value)

    get.__doc__ = f"`llama_cpp.Llama.{name}` of the calling thread's request."
    return property(get, put)


class StatefulLlama(llama_cpp.Llama):  # type: ignore[misc]
    """Upstream's attributes and operations on live tokens."""

    requests: Requests
    _calls: NativeCalls

    input_ids = upstream_attribute("input_ids")
    n_tokens = upstream_attribute("n_tokens")
    scores = upstream_attribute("scores")
    _sampler = upstream_attribute("sampler")
    _requires_eval = upstream_attribute("requires_eval")
    _logits_all = upstream_attribute("logits_all")

    @property
    def _seed(self) -> int:
        """The seed of the current request; outside of one, that from which upstream draws the next."""
        inside = self.requests.inside
        return self.requests.next_seed() if inside is None else inside.view.seed

    @_seed.setter
    def _seed(self, seed: int) -> None:
        if not (self.requests.salted and self.requests.salt()):
            self.requests.seed = seed
        if (inside := self.requests.inside) is not None:
            inside.view.seed = seed

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens behind the `n_tokens` present, in batches of at most `n_batch`.

        Raises ContextOverflow, with nothing decoded, if they do not fit, DecodeError if the library fails;
        the state is sound either way.
        """
        if self.requests.loop is None:
            self._calls.run(super().eval, tokens)
        else:
            self.requests.alone(lambda slot: slot.eval(tokens))

    @as_of(llama_cpp.Llama.sample)
    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Sample as `llama_cpp.Llama.sample`. Raises LlamaHybridError without logits to sample from."""
        if self.requests.several and not self.n_tokens:
            raise AssertionError("there are no tokens to sample behind: eval some first")  # as upstream
        try:
            return int(self._calls.run(super().sample, *args, **kwargs))
        except BaseException:
            self._sampler = None  # upstream would use that of a call that failed for the next one, too
            raise

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return sampler_for(self, super()._init_sampler, *args, **kwargs)

    def last_row(self, index: int = -1) -> Logits:
        """Logits of an evaluated token, shape (n_vocab,). Raises LlamaHybridError without one."""
        row = self.requests.seen.row(index)
        if row is None and index == -1:
            self.requests.alone(Slot.bring_row)
            row = self.requests.seen.row(index)
        if row is None:
            raise LlamaHybridError("there are no logits to sample from: eval a token first")
        return row

    @property
    def _scores(self) -> Any:
        # A criterion is shown the last row even where a request was cancelled before its first batch.
        return self.scores[: max(1, self.n_tokens), :]

    def reset(self) -> None:
        """Clear the current sequence; the prompt cache stays."""
        if self._calls.closed:
            self.n_tokens = 0
        elif self.requests.loop is None:
            self._calls.run(super().reset)
        else:
            self.requests.alone(Slot.reset)

    def save_state(self) -> llama_cpp.LlamaState:
        """Return the whole context as upstream's `LlamaState`, with a checksum."""
        if self.requests.loop is None:
            return self._calls.run(super().save_state)
        return self.requests.whole(partial(save, self, super().save_state))

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Make a saved state the current one; with one slot also a state saved by upstream.

        Raises SnapshotError, with nothing changed, for a damaged state or one of another model or `n_ctx`,
        RuntimeError if the library refuses it.
        """
        if self.requests.loop is None:
            self._calls.run(super().load_state, state)
        else:
            self.requests.whole(partial(load, self, state, super().load_state))
