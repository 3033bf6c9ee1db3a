"""An engine whose state is the list of tokens it saw, so that a wrong restore shows as wrong tokens.

A request runs as the real one does: both drive the same `Schedule`, and do what it answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llamahybrid.core.schedule import Action, Actions, Schedule, before_tip_goes, gives_up_tip
from llamahybrid.prompt_cache import Costs, LiveView, Plan, PromptCache
from llamahybrid.prompt_cache.base import NOTHING, Bytes, LiveState, Logits, Segment, Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, open_sealed, seal, sealed
from tests.lab.naive import NaivePromptCache

Kind = Literal["recurrent", "hybrid", "window", "plain", "paged"]
"""`plain`: attention that can be cut anywhere; `paged`: the same, and it is stored when it is given up."""
WINDOW = 8
STORED = ("ram", "disk", "remote")
CHEAP = Costs(token_seconds=1e-2, prefill_seconds=1e-3, snapshot_seconds=1e-5, snapshot_bytes=1024)


def logits_of(tokens: Sequence[int], n: int = 2) -> Logits:
    """Logits that only this token list has, shape (n,)."""
    logits = np.zeros(n, np.float32)
    logits[:2] = len(tokens), zlib.crc32(np.array(tokens, np.int32).tobytes()) % 9973
    return logits


@dataclass(frozen=True)
class FakeAttention:
    """Attention in segments: each holds its tokens and those before them."""

    token_bytes: int
    namespace: str = "model"

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> Segment:
        words = np.zeros((len(tokens) + 1, self.token_bytes // 8), np.int64)
        words[0, 0] = zlib.crc32(np.array(before, np.int32).tobytes())
        words[1:, 0] = tokens
        start, path = len(before), tokens_of(before, tokens)
        payload = words.view(np.uint8).reshape(-1)
        record = sealed(payload, namespace=self.namespace, tokens=path, start=start)
        return Segment(start, len(path), record, self)

    def tokens_in(self, segment: Segment, before: Sequence[int]) -> list[int]:
        """The tokens of a segment, which must belong behind `before`."""
        words = segment.record[HEADER_BYTES:].view(np.int64)
        tokens: list[int] = words[:: self.token_bytes // 8].tolist()
        digest = tokens.pop(0)
        assert len(tokens) == segment.end - segment.start, "a segment lies about its range"
        assert segment.start == len(before), "a segment does not follow what is there"
        assert digest == zlib.crc32(np.array(before, np.int32).tobytes()), "foreign attention"
        return tokens

    def parts(self, segment: Segment, path: Tokens, ranges: Iterable[tuple[int, int]]) -> Iterator[Segment]:
        """Parts of a segment of `path`. Raises ValueError where it is damaged."""
        tokens = path.tolist()
        try:
            sound = tokens[segment.start :] == self.tokens_in(segment, tokens[: segment.start])
        except AssertionError as error:
            raise ValueError(str(error)) from error
        if not sound:
            raise ValueError("a segment of other tokens")
        for start, end in ranges:
            assert segment.start <= start < end <= segment.end, "no part of it"
            yield self.of(tokens[:start], tokens[start:end])

    def join(self, segments: Sequence[Segment], path: Tokens) -> Segment:
        """One segment for adjoining ones of `path`. Raises ValueError where one is damaged."""
        tokens, start = path.tolist(), segments[0].start
        for segment in segments:
            next(self.parts(segment, path[: segment.end], [(segment.start, segment.end)]))
        assert [s.end for s in segments] == [*(s.start for s in segments[1:]), len(tokens)], "a hole"
        return self.of(tokens[:start], tokens[start:])


@dataclass
class FakeEngine:
    """A context: `state` has the tokens that its memory saw, `attention` those whose KV it holds."""

    cache: PromptCache | NaivePromptCache
    kind: Kind = "hybrid"
    namespace: str = "model"
    costs: Costs = CHEAP
    snapshot_tokens: int = 64
    """Snapshots are padded to a multiple of this number of tokens."""
    state: list[int] = field(default_factory=list)
    logits: Logits | None = None
    prefilled: int = 0
    cuts: int = 0
    """Cuts that made one more batch."""
    pages: bool = True
    """Attention KV can be saved and loaded."""
    snapshot_bytes: int = 0
    """Size of every snapshot with its envelope; 0: as large as its tokens need."""
    token_bytes: int = 8
    """Attention KV of a token, a multiple of 8."""
    vocabulary: int = 2
    """Logits of a prompt's end."""
    staged: list[tuple[int, Bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._schedule: Schedule | None = None
        self.followed = LiveState(lambda: np.array(self.state, np.int32))

    def view(self) -> LiveView:
        n = len(self.state)
        floors = {"recurrent": n, "hybrid": n, "window": max(0, n - WINDOW), "plain": 0, "paged": 0}
        return LiveView(
            namespace=self.namespace,
            tokens=np.array(self.state, np.int32),
            cut_floor=floors[self.kind],
            needs_checkpoints=self._snapshots,
            needs_attention=self.kind in ("hybrid", "window", "paged"),
            tip_logits=self.logits is not None,
            split=self.paging if self.pages and self.kind in ("hybrid", "window", "paged") else None,
            state=self.followed,
            attention_is_all=self.kind == "paged",
        )

    def page_out(self) -> None:
        view = self.view()
        for start, end in self.cache.missing(view):
            segment = self.attention_of(self.state[:start], self.state[start:end])
            record = self.cache.segment_buffer(view, segment.nbytes)
            if record is None:
                break
            record[:] = segment.record
            if not self.cache.store_segment(view, Segment(start, end, record, segment.split)):
                break
        self.cache.queue_writes(view)

    def snapshot(self) -> Bytes:
        """The state as bytes: length, tokens, padding; in a buffer of the cache if it lends them."""
        if self.kind == "paged":
            return NOTHING
        words = -(-(len(self.state) + 1) // self.snapshot_tokens) * self.snapshot_tokens
        buffer = self.cache.buffer(self.snapshot_bytes or HEADER_BYTES + 4 * words)
        buffer[HEADER_BYTES:].view(np.int32)[: len(self.state) + 1] = [len(self.state), *self.state]
        seal(buffer, namespace=self.namespace, tokens=tokens_of(self.state))
        return buffer

    def checkpoint(self, logits: Logits | None = None) -> bool:
        return self.cache.admit(self.view(), len(self.state), self.snapshot(), logits)

    def apply(self, plan: Plan, prompt: Sequence[int]) -> None:
        """Do what the plan says, as the real memory would, and prove the state is the prompt's prefix."""
        if plan.source in STORED and self.kind == "paged":
            assert plan.checkpoint is None
            attention = self.state[: plan.live_kept]
            for segment in plan.segments:
                attention += self.tokens_in(segment, attention)
            self.state = attention[: plan.cached]
        elif plan.source in STORED:
            assert plan.checkpoint is not None
            ids = tokens_of(prompt[: plan.cached])
            payload = open_sealed(plan.checkpoint.snapshot, namespace=self.namespace, tokens=ids)
            words = payload.view(np.int32)
            restored = words[1 : 1 + words[0]].tolist()
            if self.kind in ("hybrid", "window"):
                attention = self.state[: plan.live_kept if plan.segments else plan.cached]
                for segment in plan.segments:
                    attention += self.tokens_in(segment, attention)
                assert attention[: plan.cached] == restored, "attention KV of the prefix is not there"
            self.state = restored
        elif plan.source == "live":
            assert self.view().cut_floor <= plan.cached <= len(self.state), "the memory cannot be cut there"
            if plan.cached < len(self.state):
                self.logits = None
            self.state = self.state[: plan.cached]
        else:
            assert plan.cached == 0
            self.state = []
        if plan.source != "live":
            self.logits = None
        assert self.state == list(prompt[: plan.cached]), "restored tokens are not the prompt's"
        if plan.logits is not None:
            assert plan.cached == plan.total
            self.logits = plan.logits.copy()
        if plan.cached == plan.total:
            assert self.logits is not None, "nothing to sample from"
            assert np.array_equal(self.logits, logits_of(self.state, self.vocabulary)), (
                "logits of another prompt"
            )

    def decode(self, tokens: Sequence[int]) -> None:
        if tokens:
            self.state += tokens
            self.logits = logits_of(self.state, self.vocabulary)

    def request(
        self, prompt: Sequence[int], boundaries: Sequence[int] = (), answer: Sequence[int] = ()
    ) -> Plan:
        """A whole request; the prompt's tokens that were decoded are counted in `prefilled`.

        `answer`: its tokens that are decoded (the last one that a caller is given is not).
        """
        plan = self._prefill(prompt, boundaries)
        self._decode_answer(answer)
        self._end()
        return plan

    def prefill(self, prompt: Sequence[int], boundaries: Sequence[int] = ()) -> Plan:
        """A request that ends with its first token: the state is then the prompt's end."""
        return self.request(prompt, boundaries)

    def generate(self, answer: Sequence[int]) -> None:
        """The last request goes on, though it ended before; without one, a state that was put there does."""
        if self._schedule is None:
            n = len(self.state)
            self._schedule = self._scheduled(Plan(n, n, n, "live", None, None))
            self._carry_out(self._schedule.prompt_done(n, logits=True))
        self._decode_answer(answer)
        self._end()

    def _prefill(self, prompt: Sequence[int], boundaries: Sequence[int]) -> Plan:
        while not self.cache.follow(self.followed, np.array(prompt, np.int32)):
            self.state, self.logits = [], None
        tip = len(self.state)
        plan = self.cache.plan(np.array(prompt, np.int32), self.view(), boundaries, self.costs)
        try:
            if gives_up_tip(plan, tip) and self._keeps_chats:
                self._carry_out(before_tip_goes(self.cache.unstored(self.view())))
            self.apply(plan, prompt)
        finally:
            self.cache.release(plan)
        wanted = self._snapshots
        self._schedule = schedule = self._scheduled(plan, wanted=wanted)
        self._carry_out(schedule.begin(tip))
        for stop in (*plan.cuts, plan.total):
            self.decode(prompt[len(self.state) : stop])
            self._carry_out(schedule.decoded(stop))
        self.prefilled += plan.total - plan.cached
        self.cuts += sum(cut % self.costs.batch_tokens != 0 for cut in plan.cuts)
        if wanted:
            self._carry_out(schedule.prompt_done(plan.total, self.logits is not None))
        return plan

    def _decode_answer(self, answer: Sequence[int]) -> None:
        """Decode an answer; many tokens at once where the schedule has nothing to say in between."""
        assert self._schedule is not None, "an answer needs a prompt"
        done = 0
        while done < len(answer):
            self._carry_out(self._schedule.before_token(len(self.state)))
            count = min(len(answer) - done, self._schedule.next_due - len(self.state))
            self.decode(answer[done : done + count])
            done += count

    def _end(self) -> None:
        assert self._schedule is not None, "only what began can end"
        self._carry_out(self._schedule.end(len(self.state)))

    def _scheduled(self, plan: Plan, *, wanted: bool = True) -> Schedule:
        return Schedule(plan, self.costs, lambda: self.costs, wanted=wanted, keeps_chats=self._keeps_chats)

    @property
    def _keeps_chats(self) -> bool:
        return self.kind == "recurrent" or (self.kind != "plain" and self.pages)

    @property
    def _snapshots(self) -> bool:
        return self.kind not in ("plain", "paged")

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Action.STAGE:
                    self.staged.append((len(self.state), self.snapshot()))
                case Action.ADMIT_STAGED:
                    view = self.view()
                    for position, snapshot in self.staged:
                        self.cache.admit(view, position, snapshot)
                    self.staged.clear()
                case Action.CHECKPOINT:
                    self._stored(self.checkpoint())
                case Action.CHECKPOINT_IF_FINITE if self.logits is not None:
                    self._stored(self.checkpoint())
                case Action.CHECKPOINT_WITH_LOGITS:
                    self._stored(self.checkpoint(self.logits))
                case Action.REMEMBER:
                    self.cache.remember(self.namespace, np.array(self.state, np.int32), self.followed)
                case Action.PAGE_OUT | Action.PAGE_OUT_LATER:
                    self.page_out()

    def _stored(self, stored: bool) -> None:
        if stored and self._schedule is not None:
            self._schedule.stored(len(self.state))

    def attention_of(self, before: Sequence[int], tokens: Sequence[int]) -> Segment:
        return self.paging.of(before, tokens)

    def tokens_in(self, segment: Segment, before: Sequence[int]) -> list[int]:
        return self.paging.tokens_in(segment, before)

    @property
    def paging(self) -> FakeAttention:
        """The layout of its attention; it refers to no engine, so that a cache keeps no engine alive."""
        return FakeAttention(self.token_bytes, self.namespace)


def tokens_of(*parts: Tokens | Sequence[int]) -> Tokens:
    return np.concatenate([np.asarray(p, np.int32) for p in parts])
