"""Count the tokens that llama-server would decode, by its rules for slots, checkpoints and prompt cache.

A hybrid or recurrent model, requests one after the other, four slots on one unified KV buffer, everything
else at its default. An idle slot is then saved and cleared before the next request runs, so that there is one
live prompt at a time. The rules are those of llama.cpp's tools/server as vendored in llama-cpp-python 0.3.36:
server-context.cpp:1528 (which slot), 2290 (making room for a checkpoint), 3250-3390 (what of a prompt is
reused), 3500-3615 (where checkpoints are taken), 2417 (idle slots); server-task.cpp:1711 (saving), 1793
(loading).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix

SIMILARITY = 0.1
"""A slot is taken for a prompt of which it holds more than this share."""
KEEP = 0.5
"""A slot that loses more than the rest of its tokens is saved first, and a better saved prompt looked for."""
TRASH = 0.25
"""A saved prompt of which less than this would be used is left alone."""
BATCH, UBATCH = 2048, 512
BEFORE_END = (4 + UBATCH, 4)
"""Tokens before a prompt's end where a batch ends, so that the next one starts with a checkpoint."""
MIN_STEP = 8192
"""Least distance of other checkpoints, in tokens."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of state, in bytes."""

    snapshot: int
    """Size of a checkpoint."""
    token: int
    """Attention KV of a token."""


@dataclass(frozen=True)
class _Checkpoint:
    position: int
    task: int


@dataclass
class _Prompt:
    """Evaluated tokens with their checkpoints, live in a slot or saved."""

    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    checkpoints: list[_Checkpoint] = field(default_factory=list)

    def nbytes(self, sizes: Sizes) -> int:
        """Its whole state and its checkpoints, saved."""
        return sizes.snapshot * (1 + len(self.checkpoints)) + sizes.token * len(self.tokens)


class ServerRules:
    """Counts what a llama-server would decode.

    `cache_bytes`: its `--cache-ram`. `checkpoints`: its `--ctx-checkpoints`, which the live slot has on top.
    """

    def __init__(self, sizes: Sizes, cache_bytes: int, checkpoints: int = 32) -> None:
        self._sizes = sizes
        self._limit = cache_bytes
        self._most = checkpoints
        self._live = _Prompt()
        self._saved: list[_Prompt] = []
        self._task = 0

    def request(self, prompt: Sequence[int], user_starts: Sequence[int], answer: Sequence[int]) -> int:
        """Tokens decoded for a prompt and the answer to it.

        `user_starts`: where users' messages start, if the prompt came through a chat template.
        """
        self._task += 1
        ids = np.array(prompt, np.int32)
        self._choose(ids)
        reused = self._reuse(ids)
        self._prefill(len(ids), reused, user_starts)
        self._live.tokens = np.concatenate([ids, np.array(answer[:-1], np.int32)])
        return len(ids) - reused + max(0, len(answer) - 1)

    def _choose(self, prompt: Tokens) -> None:
        """The slot that is like the prompt, or an empty one; with the best of what was saved in it."""
        live = self._live
        same = common_prefix(live.tokens, prompt)
        if same > SIMILARITY * len(prompt):
            if same < KEEP * len(live.tokens):
                self._save(live)
                self._live = self._load(live, prompt)
        else:
            self._live = self._load(_Prompt(), prompt)
            self._save(live)

    def _save(self, prompt: _Prompt) -> None:
        n, size = len(prompt.tokens), prompt.nbytes(self._sizes)
        held = any(common_prefix(saved.tokens, prompt.tokens) == n for saved in self._saved)
        if not n or held or size > self._limit:
            return
        self._saved = [s for s in self._saved if common_prefix(s.tokens, prompt.tokens) < len(s.tokens)]
        while self._saved and sum(s.nbytes(self._sizes) for s in self._saved) + size > self._limit:
            self._saved.pop(0)
        self._saved.append(_Prompt(prompt.tokens, list(prompt.checkpoints)))

    def _load(self, live: _Prompt, prompt: Tokens) -> _Prompt:
        """The saved prompt that is more like the new one and wastes less than `live`, or `live` itself."""
        best = live
        same = common_prefix(live.tokens, prompt)
        keep = same / len(live.tokens) if len(live.tokens) else -1.0
        for saved in self._saved:
            alike = common_prefix(saved.tokens, prompt)
            kept = alike / len(saved.tokens)
            if kept >= TRASH and kept > keep and alike > same:
                best, keep, same = saved, kept, alike
        self._saved = [s for s in self._saved if s is not best]
        return best

    def _reuse(self, prompt: Tokens) -> int:
        """Tokens of the live prompt that stay: all of them, or up to a checkpoint; never the whole prompt."""
        live = self._live
        same = common_prefix(live.tokens, prompt)
        most = same if same < len(prompt) else same - 1
        if same > 0 and len(live.tokens) > most:
            fits = (c.position for c in reversed(live.checkpoints) if c.position <= most)
            same = next(fits, 0)
        live.checkpoints = [c for c in live.checkpoints if c.position <= same + 1]
        return min(same, len(prompt) - 1)

    def _prefill(self, total: int, at: int, user_starts: Sequence[int]) -> None:
        """Batches from `at` on, with a checkpoint at the start of some."""
        checkpoints = self._live.checkpoints
        last_user = max(user_starts, default=-1)
        while at < total:
            start = at
            ahead = [total - n for n in BEFORE_END]
            for user in user_starts:
                if user == last_user or not checkpoints or user > checkpoints[-1].position + MIN_STEP:
                    ahead.append(user)
            at = min([start + BATCH, total, *(a for a in ahead if a > start)])
            near = total < at + UBATCH
            spaced = not checkpoints or start > checkpoints[-1].position + MIN_STEP
            wanted = at == total or near or start in user_starts
            if self._most and start and wanted and (near or start == last_user or spaced):
                self._checkpoint(start)

    def _checkpoint(self, position: int) -> None:
        kept = self._live.checkpoints
        last, i = -1, 0
        while len(kept) + 1 >= self._most and i < len(kept):
            if kept[i].task != self._task and last >= 0 and kept[i].position <= last + MIN_STEP:
                del kept[i]
                continue
            last, i = kept[i].position, i + 1
        del kept[: max(0, len(kept) - self._most + 1)]
        kept[:] = [c for c in kept if c.position != position]
        kept.append(_Checkpoint(position, self._task))
