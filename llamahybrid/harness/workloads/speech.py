"""Prompts made of any vocabulary's tokens, and text for chat templates; deterministic by seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

_TEXT = (
    *("river", "stone", "garden", "winter", "letter", "market", "silver", "harbour", "engine", "forest"),
    *("window", "morning", "number", "bridge", "paper", "summer", "valley", "island", "yellow", "answer"),
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that prompts are made of, as plain data."""

    words: tuple[int, ...]
    """Ordinary tokens."""
    opening: int | None
    """Control token at the start of messages; None: the vocabulary has not two control tokens."""
    thinking: int | None
    """Control token at the start of thinking."""
    unspoken: tuple[int, ...] = ()
    """All tokens that are no text."""

    @classmethod
    def of(cls, llm: llama_cpp.Llama, most: int | None = None) -> Vocabulary:
        """Return the vocabulary of a model, with at most `most` words."""
        vocab = llama_cpp.llama_model_get_vocab(llm.model)
        special = {llm.token_bos(), llm.token_eos(), llm.token_nl()}
        words: list[int] = []
        unspoken: list[int] = []
        marks: list[int] = []
        for token in range(llm.n_vocab()):
            attr = llama_cpp.llama_vocab_get_attr(vocab, token)
            (words if attr & llama_cpp.LLAMA_TOKEN_ATTR_NORMAL else unspoken).append(token)
            if attr & (llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED) and not (
                token in special or llama_cpp.llama_vocab_is_eog(vocab, token)
            ):
                marks.append(token)
        openings = _spelled(llm, "<|im_start|>") + marks
        thoughts = [mark for mark in _spelled(llm, "<think>") + marks if mark not in openings[:1]]
        opening, thinking = (openings[0], thoughts[0]) if thoughts else (None, None)
        return cls(tuple(words[:most]), opening, thinking, tuple(unspoken))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Vocabulary:
        """Read what `dataclasses.asdict` gave, after a way through JSON."""
        return cls(**{**data, **{name: tuple(data[name]) for name in ("words", "unspoken")}})


class Speech:
    """Makes prompts out of the ordinary and the control tokens of a vocabulary.

    A message is [mark, role, newline, words...] as in chat templates, with a control token as its mark.
    Thinking starts with another mark.
    """

    def __init__(
        self,
        llm: llama_cpp.Llama | Vocabulary,
        seed: int | str = 0,
        marked: bool = True,
        scale: float = 1.0,
    ) -> None:
        """Prepare the words of a vocabulary.

        With `marked` False, and in a vocabulary without two marks (Llama 2's), the marks are ordinary tokens,
        as in prompts without a template. `scale` shortens all messages and answers.
        """
        self.scale = scale
        known = llm if isinstance(llm, Vocabulary) else Vocabulary.of(llm)
        self._random = random.Random(seed)
        self._words = list(known.words)
        self._unspoken = frozenset((known.opening, known.thinking, *known.unspoken))
        if marked and known.opening is not None and known.thinking is not None:
            opening, self._think = known.opening, known.thinking
        else:
            opening, self._think = self._words[4:6]
        self._roles = {role: [opening, *self._words[i : i + 2]] for i, role in enumerate(("system", "user"))}
        self._reply = [opening, *self._words[2:4]]

    def size(self, n: int) -> int:
        """Return how many tokens or words a piece of `n` has at this scale; at least one."""
        return n if self.scale == 1.0 else max(1, round(n * self.scale))

    def words(self, n: int) -> list[int]:
        """Return `n` ordinary tokens."""
        return self._random.choices(self._words, k=self.size(n))

    def message(self, n: int, role: str = "user") -> list[int]:
        """Return a message of `n` tokens (at least 3) with its mark and role."""
        head = self._roles[role]
        return head + self._random.choices(self._words, k=max(0, self.size(n) - len(head)))

    def reply(self, thinking: bool = False) -> list[int]:
        """Return the end of a template that makes the model answer: 3 tokens, 5 with thinking."""
        return [*self._reply, self._think, self._reply[-1]] if thinking else list(self._reply)

    def spoken(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of text among `tokens`, as an answer sent back as text has them."""
        return [token for token in tokens if token not in self._unspoken]

    def sentence(self, n: int) -> str:
        """Return a text of `n` words."""
        return " ".join(self._random.choices(_TEXT, k=self.size(n)))


def spelled(tokens: Sequence[int]) -> str:
    """Return a word for each token, for targets that take no token ids."""
    return " ".join(_TEXT[token % len(_TEXT)] for token in tokens)


def _spelled(llm: llama_cpp.Llama, text: str) -> list[int]:
    """Return the token that spells `text`; empty: there is none."""
    tokens: list[int] = llm.tokenize(text.encode(), add_bos=False, special=True)
    return tokens if len(tokens) == 1 else []
