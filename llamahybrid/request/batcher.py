"""Batcher: the decodes of several requests, one `llama_decode` a step.

A step is either one token of every running answer, or a piece of one prompt; where both wait they take turns.
(One batch of both gains nothing: a hybrid memory splits it again, src/llama-batch.cpp, split_equal.) Whoever
finds a step complete makes it, for all; nobody waits for an answer whose owner does not ask for more.

All of it runs inside steps of the gate, with its lock in hand; who waits here gives the lock up meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from llamahybrid.errors import DecodeError
from llamahybrid.memory.compute_thread import new_bell, ring
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.shared import SharedContext
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.job import BatchLost, Job
from llamahybrid.request.line import POLL
from llamahybrid.request.pieces import TIMED_PIECE, Lately, PieceLine, pace_between, piece_of
from llamahybrid.request.solo import Solo
from llamahybrid.request.ticket import Ticket

GRACE_SHARE = 0.25
"""How long a step waits for answers that are expected: this share of what the last one took,"""

GRACE_SECONDS = 2e-3
"""and at least this long."""

AWAY_GRACES = 2
"""A longer absence counts as one of so many times as long: who was away once is soon waited for again."""


class Batcher:
    """Puts the tokens of several live sequences into batches."""

    def __init__(
        self,
        shared: SharedContext,
        gate: RequestGate,
        meter: CostMeter,
        n_batch: int,
        merges: bool = True,
    ) -> None:
        """`merges`: tokens of several sequences may be in one batch."""
        self._shared = shared
        shared.interrupted = gate.stop_native
        self._gate = gate
        self._meter = meter
        self._largest_step = n_batch if merges else 1
        self._jobs: dict[Ticket, Job] = {}
        self._answering: dict[Ticket, float] = {}
        """Requests in their answer, and how long each was away after its last token."""
        self._prompts: dict[Ticket, Tokens] = {}
        """Requests that decode this prompt: the first does, the others wait for its checkpoints."""
        self._steps = 0
        """Steps of answers so far."""
        self.solo = Solo(shared, gate)
        self._untold: set[Job] = set()
        """Tokens that are decoded, and whose owners had the lock since not yet."""
        self._bells: dict[Ticket, threading.Lock] = {}
        self._pieces = PieceLine()
        self._piece_seconds = 0.0
        """What pieces of prompts took since the last step."""
        self._prompt_token, self._one_step = Lately(), Lately()
        """What a token of a prompt took in the last pieces, and what the last steps did."""
        self._since = 0.0
        """When the last of those came or went that a step waits for: who waited for the lock meanwhile, while
        another one stored what it had, is not late."""
        self.settle = shared.thread.settle
        """Waits for a step whose maker was interrupted and waits no more."""
        self.rows = 0
        """Tokens decoded in steps."""

    # -- answers ---------------------------------------------------------------------------------

    def append(self, live: LiveSequence, token: int) -> None:
        """Decode one token of the answer of the request whose step this is, together with those of others.

        Raises BatchLost where memory is no longer what it was, RequestCancelled, or DecodeError.
        """
        ticket = self._gate.running
        self._answering.setdefault(ticket, 0.0)
        if self.solo.takes(ticket, partial(self._fits_alone, live)):
            self._decode_here(live, token)
            return
        ticket.alone_at = None
        job = Job(ticket, live, token)
        self._since = time.monotonic()
        self._jobs[ticket] = job
        try:
            while not job.done:
                self._gate.check()
                if self._ready():
                    self._lead()
                else:
                    self._wait(ticket, job.bell, self._clock(job))
        finally:
            if self._jobs.get(ticket) is job:
                del self._jobs[ticket]
            self._untold.discard(job)
            if not self._untold:
                self._pieces.ring()
        if job.error is not None:
            raise job.error
        if live.n != job.position + 1 or not live.row.exists_for_tip():
            raise BatchLost("memory was changed after a token was decoded")  # before we had the lock again

    def _fits_alone(self, live: LiveSequence) -> bool:
        """Nobody else's token waits, and this sequence can go on."""
        return not self._jobs and not live.state.is_invalid

    def _decode_here(self, live: LiveSequence, token: int) -> None:
        """A step of one token that nobody else waits for, in the calling thread."""
        began = time.perf_counter()
        try:
            live.decode((token,), "last", here=True)
        except DecodeError as error:
            raise BatchLost("a token could not be decoded by itself") from error
        self._stepped(1, time.perf_counter() - began)
        self._piece_seconds = 0.0
        self._since = time.monotonic()

    def _ready(self) -> bool:
        """A step can be made now."""
        if not self._jobs or self._piece_is_next():
            return False
        newcomers = self._gate.crowded  # theirs may be one more token, or a prompt, that comes first
        if len(self._jobs) == len(self._answering) and not newcomers:
            return True  # all are there
        return not self._patience() or not (newcomers or self._expects_more())

    def _clock(self, job: Job) -> float | None:
        """Seconds until a step is due that nobody rings for; None where another one does that or watches.

        One of them watches: who wakes takes time from those that decode.
        """
        first = next(iter(self._jobs.values()), None) is job
        return None if not first or self._piece_is_next() else self._patience()

    def _piece_is_next(self) -> bool:
        """A piece comes before the next step."""
        return (first := self._pieces.first()) is not None and self._may_follow(*first)

    def _expects_more(self) -> bool:
        """The next token of some answer is worth waiting for."""
        grace = self._grace()
        for ticket, away in self._answering.items():
            others = ticket in self._jobs or ticket.alone_at is not None or ticket in self._pieces
            if not others and not ticket.over and (away < grace or ticket.inside):
                return True
        return False

    def _patience(self) -> float:
        """Seconds that a step still waits for those that are expected."""
        return max(0.0, self._since + self._grace() - time.monotonic())

    def _grace(self) -> float:
        return max(GRACE_SECONDS, GRACE_SHARE * self._one_step.seconds)

    def _lead(self) -> None:
        """Decode what waits, for all."""
        jobs = self._open_jobs()[: self._largest_step]
        for job in [j for j in jobs if not j.stands]:
            job.end(BatchLost("memory was changed while a token waited to be decoded"))
        jobs = [job for job in jobs if not job.done]
        jobs.sort(key=lambda job: job.live.native.seq)
        self._shared.compute(partial(self._step, jobs), partial(self._ring, jobs))

    def _open_jobs(self) -> list[Job]:
        """Tokens that wait; one that was given up stays until its owner wakes."""
        return [job for job in self._jobs.values() if not job.done]

    def _step(self, jobs: list[Job]) -> None:
        """Decode one token each, and note it; no interrupt comes to the compute thread."""
        began = time.perf_counter()
        try:
            faults = self._shared.decode_step([(j.live, j.token) for j in jobs]) if jobs else []
        except DecodeError:
            for job in jobs:  # alone, each fails or not for what it is itself
                job.note(BatchLost("a batch of several requests failed"))
        else:
            self._stepped(len(jobs), time.perf_counter() - began)
            for job, fault in zip(jobs, faults, strict=True):
                job.note(None if fault is None else BatchLost(f"memory is not what it should be: {fault}"))
            self._untold.update(jobs)
        finally:
            self._jobs = {ticket: job for ticket, job in self._jobs.items() if not job.done}
            self._piece_seconds = 0.0
            self._since = time.monotonic()

    def _stepped(self, rows: int, seconds: float) -> None:
        """A step of so many tokens took that long."""
        if rows:
            self._one_step.took(seconds)
        self.rows += rows
        self._steps += 1
        self._meter.together = max(1, rows)
        if rows == 1:
            self._meter.decoded(1, seconds)

    # -- prompts ---------------------------------------------------------------------------------

    def begin_prompt(self, prompt: Tokens) -> None:
        """Wait until no other prompt is decoded, so that what it leaves behind serves this one."""
        ticket = self._gate.running
        self.solo.end_team()
        self._answering.pop(ticket, None)
        self._prompts.setdefault(ticket, prompt)
        bell = self._bells[ticket] = new_bell()
        try:
            while self._first_prompt() is not ticket:
                self._gate.check()
                self._wait(ticket, bell, POLL)
        except BaseException:
            self.end_prompt(ticket)
            raise
        finally:
            self._bells.pop(ticket, None)

    def prompts_wait(self, prompt: Tokens) -> bool:
        """Others of its salt that begin alike wait for what the prompt that is decoded leaves, or will."""
        ticket = self._gate.running
        return ticket.leads or any(
            other.salt == ticket.salt and common_prefix(prompt, tokens) >= MIN_SPACING
            for other, tokens in self._prompts.items()
            if other is not ticket
        )

    def waiting(self) -> int:
        """Other requests that wait for a step, for this prompt to be through, or to come in."""
        mine, others = self._gate.current, {*self._answering, *self._prompts}
        inside = sum(other is not mine and not other.over for other in others)
        return max(inside, self._gate.crowded)

    def prompt_done(self) -> None:
        """The prompt of the request whose step this is, is decoded: its answer's tokens come next."""
        ticket = self._gate.running
        self._answering.setdefault(ticket, 0.0)
        ticket.answers()
        self.end_prompt(ticket)

    def end_prompt(self, ticket: Ticket) -> None:
        """Another prompt may be decoded."""
        if self._prompts.pop(ticket, None) is not None:
            self._ring()

    def _first_prompt(self) -> Ticket | None:
        while (first := next(iter(self._prompts), None)) is not None and not first.acts:
            del self._prompts[first]
        return first

    @contextmanager
    def piece(self, live: LiveSequence, tokens: int) -> Iterator[None]:
        """The body decodes a batch of one sequence alone, once the answers that wait have had a step, and its
        tokens; one token of an answer, once a step. Raises BatchLost where memory is no longer what it was.
        """
        ticket, position = self._gate.running, live.n
        try:
            bell = self._pieces.enter(ticket, tokens)
            while not self._goes(ticket, tokens):
                self._gate.check()
                if self._ready():
                    self._lead()
                else:
                    self._wait(ticket, bell, self._patience() if self._pieces.begins_with(ticket) else None)
        finally:
            self._pieces.leave(ticket)
        if live.n != position or live.state.is_invalid:
            raise BatchLost("memory was changed while a piece of a prompt waited to be decoded")
        began = time.perf_counter()
        try:
            yield
            if tokens >= TIMED_PIECE:
                self._prompt_token.took((time.perf_counter() - began) / tokens)
        finally:
            if self._is_answers(ticket, tokens):
                ticket.alone_at = self._steps
            else:
                self._piece_seconds += time.perf_counter() - began
            self._since = time.monotonic()
            self._ring()

    def _goes(self, ticket: Ticket, tokens: int) -> bool:
        """It is its turn to decode a batch of its own."""
        if not self._pieces.begins_with(ticket):
            return False
        if not self._may_follow(ticket, tokens) and (self._jobs or self._expects_more()):
            return not self._jobs and not self._patience()
        self._untold = {job for job in self._untold if job.owed}
        return not self._untold or not self._patience()

    def _is_answers(self, ticket: Ticket, tokens: int) -> bool:
        """A batch of so many is the next token of an answer that is decoded alone: all rows are wanted."""
        return tokens == 1 and ticket in self._answering

    def _may_follow(self, ticket: Ticket, tokens: int) -> bool:
        """So small a piece comes before the next step: one cut for a checkpoint gives nobody a turn."""
        if self._is_answers(ticket, tokens):
            return ticket.alone_at != self._steps
        more = tokens * self._token_seconds() + self._meter.costs().batch_seconds
        return not self._piece_seconds or self._piece_seconds + more <= self._pace()

    def _pace(self) -> float:
        """Seconds that prompts may take between two steps."""
        return pace_between(self._one_step.seconds, self._answering, self._prompts)

    def piece_of(self, tokens: int) -> int:
        """How many of a prompt's next `tokens` are decoded at once, so that answers keep their pace."""
        if all(ticket.over for ticket in self._answering):
            return tokens
        return piece_of(tokens, self._pace(), self._token_seconds())

    def _token_seconds(self) -> float:
        """What a token of a prompt takes now: the fastest was behind few others, on an idle machine."""
        return max(self._prompt_token.seconds, self._meter.costs().prefill_seconds)

    # -- who is here -----------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """No request wants to decode, nor is one about to come in."""
        return not self._gate.crowded and all(t.over for t in (*self._answering, *self._prompts))

    def stepped(self, ticket: Ticket) -> None:
        """A request has made a step: what it holds here it gives back."""
        if ticket in self._answering:
            self._since = time.monotonic()
        if self._prompts:
            self.end_prompt(ticket)
        if ticket.whole:
            self.solo.end_team(computed=True)
        if ticket.over:
            self.leave(ticket)
        elif self.solo.team_of is not None and not self._gate.lonely(ticket):
            self.solo.end_team()

    def returned(self, ticket: Ticket) -> None:
        """A request makes a step again."""
        if ticket in self._answering:
            away = min(time.monotonic() - ticket.idle_since, AWAY_GRACES * self._grace())
            self._answering[ticket] += 0.5 * (away - self._answering[ticket])

    def leave(self, ticket: Ticket) -> None:
        """A request is over, or has lost its place."""
        self.solo.end_team()
        self.end_prompt(ticket)
        self._answering.pop(ticket, None)
        self._ring()

    def close(self) -> None:
        """Nothing more is decoded."""
        self._shared.thread.close()

    def _wait(self, ticket: Ticket, bell: threading.Lock, seconds: float | None) -> None:
        """Until somebody rings, or for so many seconds, 0 being none; None: nothing is due by the clock."""
        timeout = POLL if seconds is None else min(POLL, seconds)
        self._gate.step_aside(ticket, partial(bell.acquire, timeout=timeout))

    def _ring(self, decoded: Iterable[Job] = ()) -> None:
        """Have everybody who waits look again, and first those whose tokens are decoded."""
        for bell in [job.bell for job in (*decoded, *self._jobs.values())] + list(self._bells.values()):
            ring(bell)
        self._pieces.ring()
