"""AnswerText: the text of an answer that grows token by token, without spelling its beginning again.

Upstream spells the whole answer after each token (`Llama._create_completion`): what that takes grows with the
answer, and all of it together with its square.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

SHORT = 16
"""Fewer tokens are spelt as they come; upstream asks for pieces of an answer in between."""

Spell = Callable[[Sequence[int]], bytes]
"""The bytes of tokens, where those of a list are those of its tokens, one after the other."""


class AnswerText:
    """What was spelt last in each thread, and how it went on."""

    def __init__(self, bos: int) -> None:
        """`bos`: upstream leaves out a space behind this token, where a text begins with both."""
        self._bos = bos
        self._thread = threading.local()

    def spell(self, tokens: Sequence[int], spell: Spell) -> bytes:
        """The bytes of `tokens`; `spell` is asked for those alone that this thread has not just spelt.

        Where they, or the new ones, begin with `bos`, `spell` decides what of all is seen.
        """
        if type(tokens) is not list or len(tokens) < SHORT or tokens[0] == self._bos:  # an array, say
            return spell(tokens)
        known: list[int] = getattr(self._thread, "tokens", [])
        n = len(known)
        more = tokens[n:]
        if n and tokens[:n] == known and not (more and more[0] == self._bos):
            text: bytes = self._thread.text + spell(more) if more else self._thread.text
        else:
            text = spell(tokens)
        # Whatever interrupts this leaves nothing that is half of one and half of the other.
        self._thread.tokens = []
        self._thread.text = text
        self._thread.tokens = list(tokens)
        return text
