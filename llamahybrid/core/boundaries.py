"""Boundaries: starts of messages, and of marked parts of them, in a token list.

Chat templates open every message with a control token of the vocabulary (`<|im_start|>`, `<start_of_turn>`)
and mark parts such as thinking with control or user-defined tokens (`<think>`). A history that a client sends
back differs from the evaluated one at such places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from llamahybrid.prompt_cache.base import Tokens

_UNASKED, _PLAIN, _OPENS, _CLOSES = -1, 0, 1, 2

CLOSING = 3
"""Most tokens from one that closes a message to the start of the next one: a newline comes between."""


class Boundaries:
    """Finds boundaries by the vocabulary's token attributes; each id is asked about once."""

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        """`vocab`: the native llama_vocab pointer."""
        self._vocab = vocab
        self._kind: npt.NDArray[np.int8] = np.full(n_vocab, _UNASKED, dtype=np.int8)

    def find(self, tokens: Tokens) -> list[int]:
        """Positions in (0, n), ascending, where a message or a marked part starts.

        The start of the second message is moved before the token that closes the first one: more tools or
        instructions make the first one longer.
        """
        known = tokens >= 0  # natively decoded content has none
        ids = np.where(known, tokens, 0)
        for token in np.unique(ids[self._kind[ids] == _UNASKED]).tolist():
            self._kind[token] = self._ask(token)
        positions: list[int] = np.flatnonzero(known & (self._kind[ids] == _OPENS)).tolist()
        inside = positions[1:] if positions[:1] == [0] else positions
        closing = np.flatnonzero(known & (self._kind[ids] == _CLOSES))
        for number, start in enumerate(inside):
            found = closing[(closing > 0) & (closing < start) & (closing >= start - CLOSING)]
            if len(found):
                inside[number] = int(found[-1])
                break
        return inside

    def _ask(self, token: int) -> int:
        attributes = int(llama_cpp.llama_vocab_get_attr(self._vocab, token))
        if llama_cpp.llama_vocab_is_eog(self._vocab, token):
            return _CLOSES
        if attributes & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL:
            return _OPENS
        if attributes & llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED:
            text = llama_cpp.llama_vocab_get_text(self._vocab, token) or b""
            return _OPENS if _is_opening_tag(text) else _PLAIN
        return _PLAIN


def _is_opening_tag(text: bytes) -> bool:
    """`<think>`, `[TOOL]`, `<|x|>`: a marker; not a closing one, and not plain text such as spaces."""
    bracketed = (text[:1], text[-1:]) in ((b"<", b">"), (b"[", b"]"))
    return bracketed and not text.startswith((b"</", b"[/"))
