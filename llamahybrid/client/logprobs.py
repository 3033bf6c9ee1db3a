"""Log-probabilities as OpenAI's completions API returns them: parallel lists over tokens.

Each token is scored by the row of logits before it. Upstream's own lists for `echo` are shifted by one row
where the prompt has no BOS, and lack the last token (llama_cpp/llama.py, _create_completion).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamahybrid.prompt_cache.base import Logits

Logprobs = dict[str, list[Any]]
"""`tokens`, `text_offset`, `token_logprobs` and `top_logprobs`, each with one item a token."""

_NAMES = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
_Decoder = getincrementaldecoder("utf-8")


def top(odds: npt.NDArray[np.floating[Any]], count: int) -> list[int]:
    """The ids of the `count` likeliest tokens, likeliest first; of equal ones the higher id first."""
    if (count := min(count, len(odds))) <= 0:
        return []
    least = np.partition(odds, -count)[-count]
    among = np.flatnonzero(odds >= least)
    order = np.lexsort((among, odds[among]))[::-1][:count]
    return [int(each) for each in among[order]]


def no_logprobs() -> Logprobs:
    """Return the log-probabilities of no tokens."""
    return {name: [] for name in _NAMES}


class AnswerLogprobs:
    """The log-probabilities of an answer's tokens, as they come."""

    def __init__(self, llm: Any, best: int, before: int, prompt: Sequence[int]) -> None:
        """`best`: number of likeliest tokens; `before`: length of the prompt's text."""
        self._llm = llm
        self._best = best
        self._before = before
        self._row = len(prompt) - 1
        self._told: Logprobs | None = None

    def add(self, token: int, said: list[int], text: bytes) -> None:
        """Add the next token of an answer, behind the tokens `said` and their `text`."""
        row, self._row = self._llm._scores[self._row], self._row + 1
        if token == self._llm.token_bos():  # as upstream
            return
        offset = self._before + len(text.decode("utf-8", errors="ignore"))
        self._told = self._told or no_logprobs()
        _add(self._told, token, offset, row, self._best, partial(self._spell, said))

    def take(self) -> Logprobs | None:
        """Return the log-probabilities since the last call."""
        told, self._told = self._told, None
        return told

    def _spell(self, before: list[int], token: int) -> str:
        return str(self._llm.detokenize([token], prev_tokens=before), "utf-8", errors="ignore")


def _add(
    told: Logprobs, token: int, offset: int, row: Logits | None, best: int, name: Callable[[int], str]
) -> None:
    """Add a token, scored by the row of logits before it, beside the `best` likeliest ones."""
    logprob = likeliest = None
    if row is not None:
        odds = llama_cpp.Llama.logits_to_logprobs(row)
        likeliest = {name(each): float(odds[each]) for each in top(odds, best)}
        logprob = likeliest[name(token)] = float(odds[token])
    for key, value in zip(_NAMES, (name(token), offset, logprob, likeliest), strict=True):
        told[key].append(value)


# -- of a prompt and its answer ------------------------------------------------------------------------


class EchoedPrompt:
    """A prompt as an answer with `echo` repeats it."""

    def __init__(self, llm: Any, given: str | Sequence[int], tokens: Sequence[int]) -> None:
        """`tokens`: the ids that were decoded for what was given, with a BOS where upstream adds one."""
        self.tokens = list(tokens)
        self.pieces = [_bytes_of(llm, token) for token in tokens]
        """The bytes of each token; joined they are the text."""
        begun = bool(self.pieces) and self.tokens[0] == llm.token_bos()
        if isinstance(given, str):
            spelt, text = b"".join(self.pieces), given.encode("utf-8")
            extra = len(spelt) - len(text) if spelt.endswith(text) else 0
            self._strip(extra or len(self.pieces[0]) * begun if self.pieces else 0)
            self.text = given
            return
        if begun:
            self._strip(len(self.pieces[0]))
        if _spaced(llm) and b"".join(self.pieces).startswith(b" "):
            self._strip(1)
        self.text = b"".join(self.pieces).decode("utf-8", errors="ignore")

    def _strip(self, count: int) -> None:
        """Remove that many bytes from the front: a BOS, or a space that the tokenizer adds."""
        for n, piece in enumerate(self.pieces):
            self.pieces[n], count = piece[count:], max(0, count - len(piece))


def logprobs_with_prompt(llm: Any, best: int, prompt: EchoedPrompt, said: Sequence[int]) -> Logprobs:
    """The log-probabilities of a prompt's and an answer's tokens, each by the row before it.

    The first token has none: null. A token that is no character by itself is named by its bytes.
    """
    tokens = [*prompt.tokens, *said]
    pieces = [*prompt.pieces, *(_bytes_of(llm, token) for token in said)]
    told = no_logprobs()
    decoder, offset, name = _Decoder(errors="ignore"), 0, cache(partial(_name, llm))
    for n, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
        _add(told, token, offset, llm._scores[n - 1] if n else None, best, name)
        offset += len(decoder.decode(piece))
    return told


def _bytes_of(llm: Any, token: int) -> bytes:
    return bytes(llm.detokenize([token], special=True))


def _name(llm: Any, token: int) -> str:
    """The text of a token by itself, or its bytes."""
    spelt = _bytes_of(llm, token)
    try:
        return spelt.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def _spaced(llm: Any) -> bool:
    """The tokenizer puts a space before a text."""
    known: dict[str, str] = llm.metadata
    if known.get("tokenizer.ggml.model") != "llama":
        return False
    return known.get("tokenizer.ggml.add_space_prefix", "true") == "true"
