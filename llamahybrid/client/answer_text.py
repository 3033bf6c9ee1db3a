"""AnswerText: the text of an answer that grows token by token, without spelling its beginning again.

Upstream spells the whole answer after each token (`Llama._create_completion`): what that takes grows with the
answer, and all of it together with its square.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from llama_cpp.llama_tokenizer import LlamaTokenizer

SHORT = 16
"""Fewer tokens are spelt as they come; upstream asks for pieces of an answer in between."""

Spell = Callable[[Sequence[int]], bytes]
"""The bytes of tokens, where those of a list are those of its tokens, one after the other."""


class AnswerSpelling:
    """Spells the tokens of one answer, with some control tokens among them."""

    def __init__(self, llm: Any, spelt: frozenset[int]) -> None:
        """`spelt`: the control tokens that are part of the text."""
        self._llm = llm
        self._spelt = spelt if type(llm.tokenizer_) is LlamaTokenizer else frozenset[int]()
        self._tokens: list[int] = []
        self._text = b""

    def __call__(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens; arguments as `llama_cpp.Llama.detokenize`."""
        if not self._spelt or (len(tokens) < 2 and not self._spelt.intersection(tokens)):
            return bytes(self._llm.detokenize(tokens, prev_tokens=prev_tokens, special=special))
        known = len(self._tokens)
        if tokens[:known] != self._tokens:
            known, self._text = 0, b""
        for token in tokens[known:]:
            self._text += self._llm._model.detokenize([token], special=token in self._spelt)
        self._tokens = list(tokens)
        return self._text


class AnswerText:
    """The text that each thread has spelt last.

    Upstream asks for each new token three times, twice by itself. No more than the last one is remembered:
    what somebody's answer was made of is nobody else's.
    """

    def __init__(self, bos: int) -> None:
        """`bos`: upstream leaves out a space behind this token, where a text begins with both."""
        self._bos = bos
        self._thread = threading.local()

    def spell(self, tokens: Sequence[int], spell: Spell) -> bytes:
        """The bytes of `tokens`; `spell` is asked for those alone that this thread has not just spelt.

        All tokens go to `spell` where they, or the new ones, begin with `bos`.
        """
        if type(tokens) is not list:  # an array, say
            return spell(tokens)
        if len(tokens) == 1:
            return self._spell_one(tokens, spell)
        if len(tokens) < SHORT or tokens[0] == self._bos:
            return spell(tokens)
        known: list[int] = getattr(self._thread, "tokens", [])
        n = len(known)
        more = tokens[n:]
        if n and tokens[:n] == known and not (more and more[0] == self._bos):
            text: bytes = self._thread.text
            if more:
                text += self._spell_one(more, spell) if len(more) == 1 else spell(more)
        else:
            text = spell(tokens)
        # An interrupt in between must not leave the tokens of one text with the other text.
        self._thread.tokens = []
        self._thread.text = text
        self._thread.tokens = list(tokens)
        return text

    def _spell_one(self, tokens: list[int], spell: Spell) -> bytes:
        last: tuple[int, bytes] | None = getattr(self._thread, "last", None)
        if last is None or last[0] != tokens[0]:
            self._thread.last = last = tokens[0], spell(tokens)
        return last[1]
