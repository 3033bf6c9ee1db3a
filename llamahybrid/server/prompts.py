"""Prompts of requests: their bounds, and their tokens in a time that grows with their length alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import llama_cpp
from llama_cpp.llama_tokenizer import LlamaTokenizer

from llamahybrid.errors import ContextOverflow, LlamaHybridError
from llamahybrid.llama import Llama

LONG_TOKENS = 8
"""Bytes a token: a prompt with more may be too long for the context, and is tokenized piece by piece."""

SPARE_TOKENS = 16
"""Most tokens that a cut text has more than the same text within a longer one."""

PIECE_BYTES = 8 << 10
"""Bytes that one native call tokenizes of a text with many control tokens. The time of a call grows with the
square of their number (llama-vocab.cpp, tokenizer_st_partition: it walks a linked list at each)."""

FEW_MARKERS = 2000
"""Most control tokens in a text that is tokenized whole: llama.cpp finds them in milliseconds."""

_SPECIAL = llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN | llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
_MARKERS = _SPECIAL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_STRIPS = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP | llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP

Observer: TypeAlias = Callable[[Sequence[int]], None]
"""Gets the token ids of each prompt."""


@dataclass(frozen=True)
class PromptRules:
    """Rules for the prompts of one request."""

    most: int | None = None
    """Most tokens; None: as many as the context has."""
    observers: tuple[Observer, ...] = ()


prompt_rules: ContextVar[PromptRules | None] = ContextVar("llamahybrid.prompt_rules", default=None)
"""Rules for prompts in this context; None: texts that are tokenized here are no prompts."""


class PromptTooLong(LlamaHybridError, ValueError):
    """The prompt has more tokens than the operator allows."""


class PromptEmpty(LlamaHybridError, ValueError):
    """The prompt has no tokens."""


class TokenText(str):
    """Token ids in the place of a text, for upstream code that encodes and tokenizes texts."""

    def __new__(cls, ids: Sequence[int]) -> TokenText:
        """Make one of these ids, without a BOS before them."""
        made = super().__new__(cls)
        made.ids = ids
        return made

    ids: Sequence[int]

    def encode(self, *_: Any, **__: Any) -> bytes:
        """See `ServedLlama.tokenize`."""
        return _TokenBytes(array("q", self.ids).tobytes())


class _TokenBytes(bytes):
    """Token ids, 8 bytes each."""


class ServedLlama(Llama):
    """A `Llama` that refuses prompts longer than the operator allows, before decoding."""

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        """Tokenize as upstream; the tokens of a `TokenText` are its ids.

        Raises ContextOverflow for a prompt whose beginning alone fills the context.
        """
        if isinstance(text, _TokenBytes):
            return array("q", bytes(text)).tolist()
        n_ctx, end = self.n_ctx(), LONG_TOKENS * self.n_ctx()
        while prompt_rules.get() is not None and end < len(text):
            while end and text[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
            if len(self._tokens(text[:end], *args, **kwargs)) > n_ctx + SPARE_TOKENS:
                raise ContextOverflow(
                    f"This model's maximum context length is {n_ctx} tokens, but the prompt has more than "
                    f"{n_ctx + SPARE_TOKENS}. Please reduce the length of the messages."
                )
            end *= 2
        return self._tokens(text, *args, **kwargs)

    def _tokens(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Tokenize as upstream, a text with many control tokens piece by piece."""
        begins = {marker[:1] for marker, _ in self._markers} if len(text) > PIECE_BYTES else ()
        if sum(map(text.count, begins)) <= FEW_MARKERS or type(self.tokenizer_) is not LlamaTokenizer:
            whole: list[int] = super().tokenize(text, add_bos, special)
            return whole
        ends: list[int] = super().tokenize(b"", add_bos, special)  # BOS and EOS, as this vocabulary adds them
        made = ends[:1] if len(ends) == 2 or self._model.add_bos_token() else []
        after = ends[len(made) :]
        start = 0
        for end in (*self._cuts(text, special), len(text)):
            made += super().tokenize(text[start:end], False, special)
            start = end
        return made + after

    @cached_property
    def _markers(self) -> list[tuple[bytes, int]]:
        """Texts of control and user-defined tokens with their attributes, the longest first, as llama.cpp."""
        vocab, tokens = self._model.vocab, range(self.n_vocab())

        def found() -> list[tuple[bytes, int]]:
            attrs = [(token, llama_cpp.llama_vocab_get_attr(vocab, token)) for token in tokens]
            return [(llama_cpp.llama_vocab_get_text(vocab, t), attr) for t, attr in attrs if attr & _MARKERS]

        every = self._calls.run(found)  # `close` waits for it
        return sorted((each for each in every if each[0]), key=lambda each: -len(each[0]))

    def _cuts(self, text: bytes, special: bool) -> Iterator[int]:
        """Yield positions, at least `PIECE_BYTES` apart, at which llama.cpp finds the end of a control token.

        `special`: as of `tokenize`; without, user-defined tokens alone are found. None beside white space
        that such tokens may strip (Phi-3's): there the time of `<|end|>\\n` again and again is llama.cpp's.
        """
        markers = [(marker, attr) for marker, attr in self._markers if special or not attr & _SPECIAL]
        covered = text
        for marker, _ in markers:
            covered = covered.replace(marker, b"\xff" * (len(marker) - 1) + b"\xfe")  # no UTF-8 has these
        strips = any(attr & _STRIPS for _, attr in markers)  # such a token takes white space beside it away
        end = 0
        while end := covered.find(b"\xfe", end + PIECE_BYTES) + 1:
            if not (strips and (text[end - 1 : end].isspace() or text[end : end + 1].isspace())):
                yield end

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """Generate as `Llama.generate`. Raises PromptTooLong, PromptEmpty."""
        if not len(tokens):
            raise PromptEmpty("the prompt is empty: there is nothing to go on from")
        rules = prompt_rules.get() or PromptRules()
        if rules.most is not None and len(tokens) > rules.most:
            raise PromptTooLong(f"the prompt has {len(tokens):,} tokens; this server takes {rules.most:,}")
        for observe in rules.observers:
            observe(tokens)
        return super().generate(tokens, *args, **kwargs)


def detokenized(llm: Llama, tokens: Sequence[int], special: bool = False) -> bytes:
    """Return the bytes of tokens as `Llama.detokenize`, which copies the text once more at each token."""
    if len(tokens) <= FEW_MARKERS or type(llm.tokenizer_) is not LlamaTokenizer:
        return bytes(llm.detokenize(list(tokens), special=special))
    pieces = {token: llm.detokenize([token], special=special) for token in set(tokens)}
    text = b"".join(map(pieces.__getitem__, tokens))
    return text[tokens[0] == llm.token_bos() and text[:1] == b" " :]
