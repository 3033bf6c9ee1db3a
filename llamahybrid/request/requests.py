"""Requests: what a `Llama` does for each ticket of its gate, from the first step to the last.

Upstream keeps what one request needs (ids, sampler, rows of logits) on the `Llama` itself. Here it is put
aside when another request takes the place, and brought back when the first one is advanced again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import numpy as np

from llamahybrid.errors import DecodeError, LlamaHybridError, RequestCancelled, RequestSuperseded
from llamahybrid.prompt_cache.base import LiveState, Tokens
from llamahybrid.request.arrays import SetAside
from llamahybrid.request.evaluation import Evaluation
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.handle import RequestHandle, advanced_for, handle_here
from llamahybrid.request.native_calls import piece
from llamahybrid.request.report import RequestReport
from llamahybrid.request.request import Request
from llamahybrid.request.salt import SHARED
from llamahybrid.request.ticket import Ticket

if TYPE_CHECKING:
    from llamahybrid.llama import Llama
    from llamahybrid.request.batcher import Batcher
    from llamahybrid.request.slots import Slots

Result = TypeVar("Result")


@dataclass(frozen=True)
class Parked:
    """What a suspended request needs to go on; `known`: whether its tokens are forgotten meanwhile."""

    arrays: SetAside
    memory: Tokens
    """What was live: every image has ids of its own there."""
    active: Request | None
    known: LiveState


class Requests:
    """The requests of one `Llama`, as many at a time as it has slots."""

    def __init__(self, llm: Llama, wait: bool | float) -> None:
        self._of = ref(llm)  # no cycle: a model is freed when nobody uses it any more
        self.gate = RequestGate(wait, self)
        self.seed = 0
        """Upstream's, which goes on from request to request; not by way of those that have a salt."""
        self.salted = False
        """Some request had a salt."""
        self.logprobs_on_request = False
        """Requests with `logprobs` keep the rows that these need, as with `logits_all`, and no others do."""
        self._last: Request | None = None
        self._thread = threading.local()

    @property
    def _llm(self) -> Llama:
        llm = self._of()
        assert llm is not None, "whoever makes a request holds it"
        return llm

    @property
    def evaluation(self) -> Evaluation | None:
        """What decodes for the one that is meant; None where upstream does, without them."""
        llm = self._of()
        return None if llm is None else llm.slots.here().evaluation

    @property
    def slots(self) -> Slots:
        """Where they are decoded."""
        return self._llm.slots

    @property
    def last(self) -> Request | None:
        """What `last_request` tells of: the calling thread's, or the last of all if it made none.

        Only of the salt that requests made here have; the thread's own outside of any, too.
        """
        own: Request | None = getattr(self._thread, "request", None)
        salt = self.salt() if self.salted else SHARED
        if own is not None and salt in (SHARED, own.salt):
            return own
        return self._last if self._last is not None and self._last.salt == salt else None

    @last.setter
    def last(self, request: Request) -> None:
        self._last = self._thread.request = request

    @property
    def active(self) -> Request | None:
        """The request that is open."""
        evaluation = self.evaluation
        return None if evaluation is None else evaluation.active

    def ticket(self, completing: bool = False, rows: bool = False) -> Ticket:
        """A ticket for a request that is made here and now, known to the handle of this context."""
        ticket = Ticket(completing, rows)
        ticket.salt = self.salt()
        if (handle := self.handle()) is not None:
            ticket.on_progress = handle.on_progress
            handle.add(ticket)
        return ticket

    def handle(self) -> RequestHandle | None:
        """What requests that are made here and now belong to."""
        return handle_here(self.gate)

    def salt(self) -> bytes:
        """Digest of the salt of requests that are made here and now: inside a step that of its request."""
        gate = self.gate
        if gate.inside and not gate.telling and gate.nested() and gate.current is not None:
            return gate.current.salt
        handle = self.handle()
        return SHARED if handle is None else handle.salt

    def next_seed(self) -> int:
        """What upstream draws the next request's seed from; one with a salt learns nothing of others'."""
        return secrets.randbits(32) if self.salted and self.salt() else self.seed

    def handle_for(self, salt: bytes | None) -> RequestHandle:
        """A handle for requests with a salt, given by its digest; None: that of those made here and now.

        Raises LlamaHybridError inside a request of another one.
        """
        here = self.salt()
        salt = here if salt is None else salt
        if salt != here and self.gate.inside and self.gate.nested():
            raise LlamaHybridError("a request inside another one has that one's salt")
        self.salted |= salt != SHARED
        return RequestHandle(self.gate, salt=salt)

    def stream(self, made: Iterator[Any]) -> Iterator[Any]:
        """A stream that was made here and now: whatever it asks for later, it does with this salt."""
        handle, salt = self.handle(), self.salt()
        if handle is None and not self.salted:
            return made
        return advanced_for(RequestHandle(self.gate, handle, salt).entered(), made)

    def refuse_salt(self) -> None:
        """There is no prompt cache. Raises LlamaHybridError for what is asked under a salt all the same."""
        if self.salted and self.salt():
            raise LlamaHybridError("upstream's own reuse knows no cache_salt: leave out prompt_cache=False")

    def part_of_step(self, ticket: Ticket) -> bool:
        """A request is part of the step that runs. Raises LlamaHybridError where that has another salt."""
        if not self.gate.nested():
            return False
        if self.gate.current is not None and self.gate.current.salt != ticket.salt:
            raise LlamaHybridError("a request of one salt cannot be part of one that has another")
        return True

    def drive(
        self, ticket: Ticket, start: Callable[[], Generator[Any, Any, None]]
    ) -> Generator[Any, Any, None]:
        """Run a generator as a request, each step at the gate; as part of the running one where inside it."""
        if self.part_of_step(ticket):
            yield from start()
            return
        inner, batcher = start(), self.slots.batcher
        try:
            sent = None
            while True:
                try:
                    item = self.gate.run(ticket, self._advance, ticket, batcher, inner.send, sent)
                except StopIteration:
                    return
                sent = yield item
        finally:
            self.gate.abandon(ticket)

    def _advance(self, ticket: Ticket, batcher: Batcher | None, send: Callable[[Any], Any], sent: Any) -> Any:
        if batcher is not None:
            batcher.returned(ticket)
        try:
            return send(sent)
        except BaseException:  # its end, too
            self.gate.finish(ticket)
            raise

    def alone(self, work: Callable[[Evaluation], Result], salt: bytes | None = None) -> Result:
        """A single operation where this thread decodes: part of the step it is called in, or its own.

        `salt`: that of whom it is for, if not of what is asked here and now.
        """
        ticket = Ticket()
        ticket.salt = self.salt() if salt is None else salt
        return self.gate.alone(lambda: work(self._evaluation), ticket=ticket)

    def whole(self, work: Callable[[], Result], completing: bool = False, rows: bool = False) -> Result:
        """A single operation on the whole context, while no other request is in."""
        if len(self.slots.all) > 1 and self.gate.nested():
            raise LlamaHybridError("the whole context cannot be had inside a request, with others beside it")
        ticket = self.ticket(completing, rows)
        ticket.whole = True
        return self.gate.alone(work, ticket=ticket)

    # -- one after the other, inside a step --------------------------------------------------------

    def open(self, tokens: Sequence[int], reset: bool) -> tuple[Request, Tokens]:
        """The request that runs begins with a prompt (see `Evaluation.begin`); what is left to decode."""
        evaluation, ticket = self._evaluation, self.gate.current
        prompt = evaluation.checked(tokens)
        self.end_active()
        if self.slots.batcher is not None and ticket is not None:
            self.slots.batcher.begin_prompt(prompt)
            if reset and not evaluation.handoff and ticket.rests_on is None:
                self.slots.move(ticket, prompt)
                evaluation = self._show(ticket)
                evaluation.serve(ticket.salt)
            evaluation.claim()
            evaluation.require_fit(len(prompt))
        if ticket is not None and ticket.rests_on is not None:
            evaluation.go_on_from(ticket.rests_on)
            ticket.rests_on = None
        request, rest = evaluation.begin(prompt, reset)
        if ticket is not None:
            request.salt = ticket.salt
            ticket.request = request
        self.last = request
        self._begin_progress(request, ticket)
        return request, rest

    def _begin_progress(self, request: Request, ticket: Ticket | None) -> None:
        """Have the progress of a prompt told from its restore point on; of several answers, the first's."""
        told = (ticket and ticket.on_progress) or self._llm.on_progress
        if told is not None and (ticket is None or ticket.after is None):
            request.on_progress = partial(self._outside, told)
            request.reach(request.plan.cached)

    def _outside(self, told: Callable[[Result], None], item: Result) -> None:
        """`told(item)`, which must not use the model."""
        self.gate.telling = True
        try:
            told(item)
        finally:
            self.gate.telling = False

    def end_active(self) -> None:
        """End the request that is open, keeping its progress, and tell of it; it cannot go on."""
        if (active := self.active) is not None:
            active.over = True
            self._end_active(self._evaluation)

    def _end_active(self, evaluation: Evaluation) -> None:
        if self._llm._ctx.ctx is None:  # closed
            evaluation.active = None
        else:
            self._tell(evaluation.end())

    def computed_under(self, salt: str) -> None:
        """The model's own salt is another one: what is live is known by it from now on."""
        self._end_active(self._evaluation)
        for each in self._evaluation.runner.live.shared.members:
            assert each.identity.computation is not None
            each.identity.computed_by(replace(each.identity.computation, salt=salt))

    def report(self, request: Request) -> RequestReport:
        """What a request did, as its user is told."""
        return request.report(self.spell, explain=self._llm._explain)

    def spell(self, token: int) -> str:
        """The text of one token; its id where it has none (what was decoded natively, a closed model)."""
        llm = self._llm
        return str(token) if not 0 <= token < llm._n_vocab else piece(llm._model, token)

    def _tell(self, request: Request | None) -> None:
        """Report a request that is over."""
        told = self._llm.on_request
        if request is not None and told is not None:
            self._outside(told, self.report(request))

    # -- for the gate: all inside a step -----------------------------------------------------------

    @property
    def _evaluation(self) -> Evaluation:
        evaluation = self.evaluation
        assert evaluation is not None, "without one nobody gets a ticket"
        return evaluation

    def _evaluation_of(self, ticket: Ticket) -> Evaluation:
        """What decodes for a ticket, whoever's step this is."""
        if ticket.slot is None:
            return self._evaluation
        assert ticket.slot.evaluation is not None, "without one nobody gets a ticket"
        return ticket.slot.evaluation

    def switch(self, ticket: Ticket) -> None:
        """See `Tenant.switch`."""
        slots = self.slots
        if slots.batcher is not None:
            slots.batcher.settle()
        slots.seat(ticket, None if ticket.parked is None else ticket.parked.memory)
        self._show(ticket)

    def _show(self, ticket: Ticket) -> Evaluation:
        """Upstream's code means the slot of this ticket."""
        evaluation = self._evaluation_of(ticket)
        self._llm._ctx.live = evaluation.runner.live
        return evaluation

    def joined(self, ticket: Ticket) -> None:
        """See `Tenant.joined`."""
        if (batcher := self.slots.batcher) is not None and batcher.solo.team_of is not None:
            batcher.solo.end_team()

    def stepped(self, ticket: Ticket) -> None:
        """See `Tenant.stepped`."""
        if (batcher := self.slots.batcher) is not None:
            batcher.stepped(ticket)

    def begin(self, ticket: Ticket) -> None:
        """See `Tenant.begin`."""
        evaluation = self._evaluation_of(ticket)
        evaluation.active = None  # an interrupt in `park` may have left it
        evaluation.serve(ticket.salt)
        if self.slots.batcher is None or ticket.whole:  # else once the slot is chosen in which it begins
            evaluation.claim()
        evaluation.arrays.keep_rows(ticket.rows)
        evaluation.arrays.seed = secrets.randbits(32) if ticket.salt else self.seed

    def park(self, ticket: Ticket) -> None:
        """See `Tenant.park`; what the caller has not seen yet of a draft goes."""
        if ticket.slot is not None:
            self.slots.seat(ticket)
            self._show(ticket)
        evaluation = self._evaluation_of(ticket)
        arrays, runner, request = evaluation.arrays, evaluation.runner, evaluation.active
        if request is not None:
            # First of all what upstream believes: it then decodes the last token it handed out, and samples
            # from no row that is about to go.
            if not request.sent:
                arrays.shorten(request.plan.total + request.generated - 1)
            evaluation.end_drafts(request, goes_on=True)
            request.drop_records()
            runner.save_tip()
        saved = arrays.set_aside()
        known = LiveState(lambda: saved.ids)
        runner.cache.follow(known, saved.ids)
        memory = runner.live.tokens[: len(saved.ids)].copy()
        ticket.parked = Parked(saved, memory, request, known)
        evaluation.active = None
        self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        """It gives its slot back."""
        llm = self._of()
        if llm is not None:
            llm.slots.leave(ticket)

    def resume(self, ticket: Ticket) -> None:
        """See `Tenant.resume`. Raises RequestSuperseded where what it rests on is gone for good."""
        evaluation, parked = self._evaluation_of(ticket), ticket.parked
        assert parked is not None, "only a parked request is resumed"
        arrays = evaluation.arrays
        arrays.keep_rows(ticket.rows)
        arrays.bring_back(parked.arrays)
        evaluation.handoff = False
        evaluation.active = None
        if ticket.request is not None:
            self.last = ticket.request
        if parked.active is not None:
            self._come_back(evaluation, parked)
        arrays.bring_rows(parked.arrays)
        evaluation.active = parked.active
        if parked.known.forgotten:
            evaluation.runner.stop_storing()

    def _come_back(self, evaluation: Evaluation, parked: Parked) -> None:
        """Bring context memory back to where a parked request left it."""
        assert parked.active is not None
        if parked.active.sent:
            raise RequestSuperseded("tokens were sent to this generator before another took its place")
        there = evaluation.runner.live.tokens[: len(parked.memory)]
        if len(parked.arrays.native) and not np.array_equal(there, parked.memory):
            raise RequestSuperseded("another request took the place of this one: its image is gone")
        try:
            evaluation.come_back(parked.active)
        except RequestCancelled:
            pass  # for its next step to tell: a completion ends, `generate` raises
        except DecodeError as error:
            if not len(parked.arrays.native):
                raise
            raise RequestSuperseded(f"another request took the place of this one: {error}") from error

    def end(self, ticket: Ticket) -> None:
        """See `Tenant.end`."""
        try:
            if ticket.parked is not None:
                request, ticket.parked = ticket.parked.active, None
                self._tell(request)
            else:
                evaluation = self._evaluation_of(ticket)
                try:
                    self._end_active(evaluation)
                finally:
                    evaluation.arrays.keep_rows(False)
        finally:
            self._leave(ticket)
