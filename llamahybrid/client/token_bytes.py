"""TokenBytes: the bytes of each token of a model, by which the text of an answer grows token by token.

Upstream spells the whole answer anew after each token (`Llama._create_completion`).
"""

from __future__ import annotations

from typing import Any

import llama_cpp
from llama_cpp.llama_tokenizer import LlamaTokenizer


class TokenBytes(dict[int, bytes]):
    """The bytes of tokens, each spelt once."""

    def __init__(self, llm: Any, spelt: frozenset[int] = frozenset()) -> None:
        """`spelt`: the control tokens that are part of the text."""
        super().__init__()
        self._model = llm._model
        self._bos: int = llm.token_bos()
        self._spelt = spelt

    def __missing__(self, token: int) -> bytes:
        if token == self._bos:  # upstream leaves out a space at the begin of a text that begins with it
            both: bytes = self._model.detokenize([token, token], special=token in self._spelt)
            piece = both[len(both) // 2 :]
        else:
            piece = self._model.detokenize([token], special=token in self._spelt)
        self[token] = piece
        return piece


def token_bytes(llm: Any, spelt: frozenset[int]) -> TokenBytes | None:
    """Return the bytes of a model's tokens; None where a text is not made of those of its tokens.

    `spelt`: the control tokens that are part of the text.
    """
    own = "detokenize" in vars(llm) or type(llm).detokenize is not llama_cpp.Llama.detokenize
    if own or type(llm.tokenizer_) is not LlamaTokenizer:
        return None
    known: TokenBytes = llm._token_bytes
    return TokenBytes(llm, spelt) if spelt else known
