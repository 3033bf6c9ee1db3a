"""ModelDraft: a second, smaller model guesses the next tokens of the first."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid.core.request import Decode, Steps
from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.restore import Undo
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix


class ModelDraft(LlamaDraftModel):  # type: ignore[misc]
    """A draft model for `Llama(draft_model=…)`: the greedy continuation of another `Llama`.

    The other model needs the same vocabulary, a context as long, and its prompt cache on. Its sequence is
    kept between calls, so it must not be used for anything else.
    """

    def __init__(self, llm: Any, num_pred_tokens: int = 8) -> None:
        """`num_pred_tokens`: longest draft; the length in use is chosen at run time."""
        if llm.runner is None:
            raise LlamaHybridError(
                "a draft model needs its prompt cache; open it without prompt_cache=False or embedding=True"
            )
        self.llm = llm
        self.num_pred_tokens = num_pred_tokens
        self.at_most = num_pred_tokens
        """Most tokens of the next draft; set before each call."""
        self.salt = b""
        """Digest of the request's salt; set before each request. Guesses and their durations depend on
        tokens of this salt alone."""
        self._runner = llm.runner
        self._undo = Undo(self._runner.live)

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: object) -> npt.NDArray[np.intc]:
        """Return the draft behind `input_ids`, shape (n,): shape (k,), k <= `num_pred_tokens`.

        Raises LlamaHybridError if a model drafts for itself, DecodeError if the library fails.
        """
        if self.llm.requests.inside is not None:
            raise LlamaHybridError("a model cannot draft for itself; open a second Llama for it")
        ids = np.asarray(input_ids, dtype=np.int32)
        count = min(self.num_pred_tokens, self.at_most, self._runner.live.capacity - len(ids))
        if count < 1 or ids.max() >= self._runner.live.n_vocab:
            return np.empty(0, dtype=np.intc)
        guess: npt.NDArray[np.intc] = self.llm.requests.alone(lambda _: self._guess(ids, count), self.salt)
        return guess

    def behind(self, input_ids: npt.NDArray[np.intc]) -> int:
        """Return an upper bound of the `input_ids` that the draft model has to decode first."""
        live = self._runner.live
        if not live.identity.serves(self.salt):
            return len(input_ids)
        return len(input_ids) - common_prefix(live.tokens, np.asarray(input_ids, dtype=np.int32))

    def _guess(self, ids: Tokens, count: int) -> Steps[npt.NDArray[np.intc]]:
        if not self._runner.live.identity.serves(self.salt):  # of another request
            self._runner.serve(self.salt)
        yield from self._follow(ids)
        self._undo.take()
        guess = yield from self._ahead(count)
        return np.array(guess, dtype=np.intc)

    def _follow(self, ids: Tokens) -> Steps[None]:
        """Make the sequence `ids`, with the logits of its end."""
        runner, live = self._runner, self._runner.live
        runner.check()
        if live.state.tip_logits and live.state.holds(ids):
            return
        known = min(common_prefix(live.tokens, ids), len(ids) - 1)
        request = None
        if live.state.is_invalid or (known < live.n and self._undo.go_back(known) is None):
            self._undo.drop()
            request = runner.begin(ids)
        yield from runner.decode(request, ids[live.n :], "last")
        if request is not None and not runner.prompt_done(request):
            live.empty()
            yield from runner.decode(None, ids, "last")
        runner.checkpoints.settle()

    def _ahead(self, count: int) -> Steps[list[int]]:
        """The next `count` tokens, greedily; all but the last are decoded."""
        live, vocabulary = self._runner.live, self.llm._model.vocab
        guess: list[int] = []
        while True:
            logits = live.row.logits()
            assert logits is not None
            token = int(logits.argmax())
            guess.append(token)
            if len(guess) == count or llama_cpp.llama_vocab_is_eog(vocabulary, token):
                return guess
            yield Decode(live, (token,), "last")
