"""Requests: what a `Llama` does for each ticket of its gate, from the first step to the last.

Upstream keeps what one request needs (ids, sampler, rows of logits) on the `Llama` itself. Here it is put
aside when another request takes the place, and brought back when the first one is advanced again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from llamahybrid.errors import DecodeError, RequestCancelled, RequestSuperseded
from llamahybrid.prompt_cache.base import LiveState, Tokens
from llamahybrid.request.gate import RequestGate, Ticket
from llamahybrid.request.report import RequestReport
from llamahybrid.request.request import Request

if TYPE_CHECKING:
    from llamahybrid.llama import Llama


@dataclass(frozen=True)
class Parked:
    """What a suspended request needs to go on: upstream's attributes of it, and what it has done so far."""

    ids: Tokens
    sampler: Any
    mirostat: Any
    requires_eval: bool
    rows: npt.NDArray[np.single] | None
    """Logits of the tokens, shape (n, n_vocab), where they are kept."""
    rows_known: int
    native_from: int | None
    memory: Tokens
    """What was live: every image has ids of its own there."""
    active: Request | None
    known: LiveState
    """Whether its tokens are forgotten meanwhile."""


class RequestHandle:
    """The requests that are made inside `with llm.request() as handle:`, streams among them.

    A stream belongs to it wherever and whenever it is advanced later. Safe from any thread.
    """

    def __init__(self, gate: RequestGate) -> None:
        self.open = False
        """Its `with` block runs."""
        self.outer: RequestHandle | None = None
        """The handle whose block it stands in."""
        self._gate = gate
        self._tickets: list[Ticket] = []
        self._cancelled = False

    def cancel(self) -> None:
        """End these requests and no others, as `Llama.cancel`: running, suspended, or still waiting."""
        self._cancelled = True
        for ticket in list(self._tickets):
            self._gate.cancel(ticket)

    @property
    def reports(self) -> list[RequestReport]:
        """What each of them decoded and reused, so far, in the order they were made."""
        return [t.request.report() for t in self._tickets if t.request is not None]

    def add(self, ticket: Ticket) -> None:
        """One more request."""
        self._tickets.append(ticket)
        if self._cancelled:
            self._gate.cancel(ticket)


_handle: ContextVar[RequestHandle | None] = ContextVar("llamahybrid.request", default=None)


@contextmanager
def made_with(handle: RequestHandle) -> Generator[RequestHandle, None, None]:
    """Requests made in this context belong to `handle`."""
    handle.outer, handle.open = _handle.get(), True
    _handle.set(handle)
    try:
        yield handle
    finally:
        handle.open = False
        if _handle.get() is handle:  # a generator may leave in another context, or after others came
            _handle.set(handle.outer)


class Requests:
    """The requests of one `Llama`, one at a time."""

    def __init__(self, llm: Llama, wait: bool | float) -> None:
        self._of = ref(llm)  # no cycle: a model is freed when nobody uses it any more
        self.gate = RequestGate(wait, self)
        self.active: Request | None = None
        """The one that is open."""
        self.last: Request | None = None
        """What `last_request` tells of."""

    @property
    def _llm(self) -> Llama:
        llm = self._of()
        assert llm is not None, "whoever makes a request holds it"
        return llm

    def ticket(self, completing: bool = False, rows: bool = False) -> Ticket:
        """A ticket for a request that is made here and now, known to the handle of this context."""
        ticket = self.gate.ticket(completing, rows)
        handle = _handle.get()
        while handle is not None and not handle.open:
            handle = handle.outer
        if handle is not None and handle._gate is self.gate:
            handle.add(ticket)
        return ticket

    def drive(
        self, ticket: Ticket, start: Callable[[], Generator[Any, Any, None]]
    ) -> Generator[Any, Any, None]:
        """Run a generator as a request, each of its steps at the gate."""
        inner = start()
        try:
            sent = None
            while True:
                try:
                    item = self.gate.run(ticket, self._advance, ticket, inner, sent)
                except StopIteration:
                    return
                sent = yield item
        finally:
            self.gate.abandon(ticket)

    def _advance(self, ticket: Ticket, inner: Generator[Any, Any, None], sent: Any) -> Any:
        try:
            return inner.send(sent)
        except BaseException:  # its end, too
            self.gate.finish(ticket)
            raise

    # -- for the gate: all inside a step -----------------------------------------------------------

    def begin(self, ticket: Ticket) -> None:
        """See `Tenant.begin`."""
        self.active = None  # an interrupt in `park` may have left it
        self._llm._keep_rows(ticket.rows)

    def park(self, ticket: Ticket) -> None:
        """See `Tenant.park`; what the caller has not seen yet of a draft goes."""
        llm = self._llm
        request, runner = self.active, llm.runner
        if runner is None:
            return
        if request is not None:
            # First of all what upstream believes: it then decodes the last token it handed out, and samples
            # from no row that is about to go.
            if not request.sent:
                llm.n_tokens = min(llm.n_tokens, request.plan.total + request.generated - 1)
            llm._end_drafts(request, goes_on=True)
            request.drop_records()
            runner.save_tip()
        n = llm.n_tokens
        ids = llm.input_ids[:n].astype(np.int32)
        known = LiveState(lambda: ids)
        runner.cache.follow(known, ids)
        ticket.parked = Parked(
            ids=ids,
            sampler=llm._sampler,
            mirostat=llm._mirostat_mu,
            requires_eval=llm._requires_eval,
            rows=llm.scores[:n].copy() if llm._logits_all else None,
            rows_known=llm._score_rows,
            native_from=llm._native_from,
            memory=runner.live.tokens[:n].copy(),
            active=request,
            known=known,
        )
        self.active = None

    def resume(self, ticket: Ticket) -> None:
        """See `Tenant.resume`. Raises RequestSuperseded where what it rests on is gone for good."""
        llm, parked = self._llm, ticket.parked
        n = len(parked.ids)
        llm._keep_rows(ticket.rows)
        llm.input_ids[:n] = parked.ids
        llm.n_tokens = n
        llm._sampler, llm._mirostat_mu = parked.sampler, parked.mirostat
        llm._requires_eval, llm._native_from = parked.requires_eval, parked.native_from
        llm._handoff = False
        llm._score_rows = 0
        self.active = None
        if ticket.request is not None:
            self.last = ticket.request
        if parked.active is not None:
            if parked.active.sent:
                raise RequestSuperseded(
                    "tokens were sent to this generator before another request took its place"
                )
            assert llm.runner is not None
            there = llm.runner.live.tokens[: len(parked.memory)]
            if parked.native_from is not None and not np.array_equal(there, parked.memory):
                raise RequestSuperseded("another request took the place of this one: its image is gone")
            try:
                llm._come_back(parked.active)
            except RequestCancelled:
                pass  # for its next step to tell: a completion ends, `generate` raises
            except DecodeError as error:
                if parked.native_from is None:
                    raise
                raise RequestSuperseded(f"another request took the place of this one: {error}") from error
        if parked.rows is not None:
            llm.scores[:n] = parked.rows
            llm._score_rows = parked.rows_known
        self.active = parked.active
        if parked.known.forgotten and llm.runner is not None:
            llm.runner.stop_storing()

    def end(self, ticket: Ticket) -> None:
        """See `Tenant.end`."""
        llm = self._llm
        if ticket.parked is not None:
            request, ticket.parked = ticket.parked.active, None
            llm._tell(request)
        else:
            try:
                llm._retire()
            finally:
                llm._keep_rows(False)
