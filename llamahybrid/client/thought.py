"""Thought: the tokens of an answer's thought, and its end at a budget.

`Thought` follows the tokens of one answer by their text, so that markers of several tokens, or of tokens that
hold more than the marker, are found. llama.cpp's sampler of the same purpose (common/reasoning-budget.cpp)
matches tokens.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TAIL = 32
"""Tokens of a prompt that are looked at for an open thought."""

_Decoder = getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class ThoughtMarkers:
    """The markers of a thought in a model's chat template."""

    begin: str
    """Text that begins it."""
    end: str
    """Text that ends it."""
    lead: str = ""
    """Behind `begin`, before the thought: a line break, say."""
    close: str = ""
    """From the end of the thought to the beginning of the answer, `end` included; "": `end` alone."""
    bare: str = ""
    """Text before an answer without a thought, behind the prompt."""
    again: bool = False
    """An answer may think again later on; else a thought is the first thing that it says."""

    @property
    def closing(self) -> str:
        """The text that ends a thought and begins the answer."""
        return self.close or self.end


@dataclass(frozen=True)
class Thinking:
    """The thinking of one request's answers."""

    markers: ThoughtMarkers
    budget: int | None = None
    """Tokens of a thought, after which it is ended; None: as many as the model likes."""
    message: str = ""
    """Text that a thought ends with where it is ended."""
    inside: bool | None = None
    """The prompt ends inside a thought; None: its text says so."""
    hidden: bool = False
    """A thought that the prompt opens is no part of the answer's text."""

    def thought(self, llm: Any, prompt: Sequence[int]) -> Thought:
        """Follow the thought of an answer to a prompt, given by its ids."""
        inside, model = self.inside, llm._model  # not the `Llama`, which has what this is kept by
        if inside is None:
            tail: bytes = llm.detokenize([token for token in prompt[-TAIL:] if token >= 0], special=True)
            inside = tail.rstrip().endswith(self.markers.begin.encode("utf-8"))

        def spell(token: int) -> bytes:
            return bytes(model.detokenize([token], special=True))

        return Thought(self.markers, spell, inside)

    def limit(self, llm: Any, prompt: Sequence[int]) -> ThoughtLimit | None:
        """End the thought of an answer to a prompt at the budget; None where there is no budget."""
        if self.budget is None:
            return None

        tokenizer = llm.tokenizer_

        def tokens(text: str) -> list[int]:
            return list(tokenizer.tokenize(text.encode("utf-8"), add_bos=False, special=True))

        close = self.message + self.markers.closing
        return ThoughtLimit(self.thought(llm, prompt), self.budget, close, tokens)


class Thought:
    """The place of one answer, token by token: before, inside or behind its thought."""

    def __init__(self, markers: ThoughtMarkers, spell: Callable[[int], bytes], inside: bool) -> None:
        """`spell`: the bytes of a token, control tokens included."""
        self.inside = inside
        self.tokens = 0
        """Tokens of the thought so far, without those that spell its markers or were forced."""
        self._spell = spell
        self._begin, self._end = markers.begin.encode("utf-8"), markers.end.encode("utf-8")
        self._again = markers.again
        self._over = False
        self._tail = b""
        """The last text, as far as it may belong to a marker."""
        self._lengths: deque[tuple[int, bool]] = deque(maxlen=max(8, len(self._end)))
        """Bytes of the last tokens of the thought, and True for those that `tokens` counts."""

    def follow(self, token: int, sampled: bool = True) -> None:
        """The answer has this token, too. `sampled`: the model said it, else the budget."""
        if self._over:
            return
        piece = self._spell(token)
        self._tail += piece
        if self.inside:
            self.tokens += sampled
            self._lengths.append((len(piece), sampled))
            self._look_for_end()
        elif self._again:
            self._look_for_begin()
        else:
            lead = self._tail.lstrip()
            if lead.startswith(self._begin):
                self._enter(lead[len(self._begin) :])
            self._over = not self.inside and not self._begin.startswith(lead)

    @property
    def ends_line(self) -> bool:
        """The thought has text, and ends with a line break."""
        return self.tokens > 0 and self._tail.endswith(b"\n")

    @property
    def in_character(self) -> bool:
        """The thought ends inside a character whose other bytes come with the next token."""
        decoder = _Decoder(errors="ignore")
        decoder.decode(self._tail[-3:])
        return bool(decoder.getstate()[0])

    def _look_for_end(self) -> None:
        at = self._tail.find(self._end)
        if at < 0:
            self._tail = self._tail[-max(4, len(self._end) - 1) :]
            return
        rest = len(self._tail) - at
        for length, sampled in reversed(self._lengths):  # the marker's own tokens
            if rest < length or rest <= 0:
                break
            rest -= length
            self.tokens -= sampled
        self.inside, self._over = False, not self._again
        self._tail = self._tail[at + len(self._end) :]
        self._lengths.clear()

    def _look_for_begin(self) -> None:
        at = self._tail.find(self._begin)
        if at >= 0:
            self._enter(self._tail[at + len(self._begin) :])
        else:
            self._tail = self._tail[-max(1, len(self._begin) - 1) :]

    def _enter(self, rest: bytes) -> None:
        self.inside, self._tail = True, rest
        self._lengths.clear()


class ThoughtLimit:
    """Tokens that an answer has in place of sampled ones: the end of a thought that had its budget."""

    def __init__(
        self, thought: Thought, budget: int, close: str, tokens: Callable[[str], Sequence[int]]
    ) -> None:
        """`close`: the text that ends the thought; `tokens`: the ids of a text."""
        self._thought = thought
        self._budget = budget
        self._close = close
        self._tokens = tokens
        self._forced: deque[int] = deque()
        self._taken = 0
        self.forced = set[int]()
        """Places in the answer, counted from 0, of tokens that were not sampled."""

    @property
    def free(self) -> bool:
        """The answer thinks: no grammar holds yet."""
        return self._thought.inside

    def next(self) -> int | None:
        """The token that comes next, whatever would be sampled; None: the sampled one."""
        if not self._forced and self._due():
            close = self._close[1:] if self._close[:1] == "\n" and self._thought.ends_line else self._close
            self._forced.extend(self._tokens(close))
        return self._forced[0] if self._forced else None

    def took(self, token: int) -> None:
        """The answer has this token now."""
        if self._forced:
            self._forced.popleft()
            self.forced.add(self._taken)
        self._taken += 1
        self._thought.follow(token)

    def _due(self) -> bool:
        thought = self._thought
        if not thought.inside or thought.tokens < self._budget:
            return False
        return not thought.in_character or thought.tokens >= self._budget + 3
