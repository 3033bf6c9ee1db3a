"""Requests: callers' side of a model's requests: views, salts, steps, reports.

A request is made in a caller's thread and decoded in the loop's. Inside its steps, in any thread, upstream's
attributes are its own.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar
from weakref import ref

from llamahybrid.client.handle import RequestHandle, advanced_for, handle_here
from llamahybrid.client.native_calls import ThreadState, collecting
from llamahybrid.client.salt import SHARED
from llamahybrid.core.loop import DecodeLoop
from llamahybrid.core.report import Progress, RequestReport, text_of_token
from llamahybrid.core.request import Request
from llamahybrid.core.slot import Slot
from llamahybrid.core.view import View
from llamahybrid.errors import LlamaHybridError

Result = TypeVar("Result")


class Requests:
    """The requests of one `Llama`."""

    def __init__(self, llm: Any, wait: bool | float) -> None:
        """`wait`: True waits for a slot, False raises `Busy` without a free one, seconds do both."""
        self._of = ref(llm)  # weak: no reference cycle
        self.wait = wait
        self.loop: DecodeLoop | None = None
        """The decode loop; None where upstream decodes."""
        self.seed = 0
        """Upstream's seed, which continues from request to request, except from those with a salt."""
        self.salted = False
        """Any request had a salt."""
        self.logprobs_on_request = False
        """Requests with `logprobs` keep all rows, as with `logits_all`; others do not."""
        self.several = False
        """There is more than one slot."""
        self._calling: set[Request] = set()
        """Requests that need no slot (see `beside`)."""
        self._shown = View()
        self._last: Request | None = None
        self._here = ThreadState()

    # -- views -------------------------------------------------------------------------------------

    @property
    def inside(self) -> Request | None:
        """The request whose step runs in the calling thread."""
        return None if self._here.running is None else next(iter(self._steps()), None)

    def _steps(self) -> list[Request]:
        """The requests whose steps run in the calling thread, the innermost first.

        They are read from the thread's stack, where an interrupt cannot leave one that is over.
        """
        found, frame = list[Request](), sys._getframe().f_back
        while frame is not None:
            if frame.f_code in _STEPS and (local := frame.f_locals)["self"] is self:
                found += filter(None, [local.get("running")])
            frame = frame.f_back
        return found

    @property
    def seen(self) -> View:
        """Upstream's attributes, for reading: inside a request its own, else those of this thread's last one.

        With one slot, and in a new thread: those of the last request of any thread.
        """
        if (request := self.inside) is not None:
            return request.aside if request.aside is not None and self._awaits(request) else request.view
        view = self._outside()
        return view.blank() if self.salted and view.salt != self.salt() else view

    @property
    def own(self) -> View:
        """Upstream's attributes, for changes."""
        if (request := self.inside) is not None:
            if not self._awaits(request):
                return request.view
            request.aside = request.aside or request.view.fork()
            return request.aside
        view = self._outside()
        if self._mine() is None:
            view = self._shown.blank()
        elif view.busy:
            view = view.fork()
        if self.salted and view.salt != self.salt():
            view = view.blank()
            view.salt = self.salt()
        self.show(view)
        return view

    def _awaits(self, request: Request) -> bool:
        """A task of this request runs, and the caller is a signal handler or finalizer in its thread."""
        return request.awaits and self.loop is not None and not self.loop.here

    def _outside(self) -> View:
        return self._mine() or self._shown

    def _mine(self) -> View | None:
        """The view of this thread's last request; with one slot, of the last one of any thread."""
        return self._here.view if self.several else self._shown

    def show(self, view: View) -> None:
        """Make this the view of the calling thread."""
        self._here.view = self._shown = view

    def step(self, running: Request, work: Callable[..., Result], *args: Any) -> Result:
        """Run `work(*args)` as a step of a request."""
        here, outer = self._here, self._here.running
        try:
            here.running = running
            running.entered, running.reader = True, here.mark
            return work(*args)
        finally:
            running.entered, here.running = False, outer

    # -- making requests ---------------------------------------------------------------------------

    def request(self, completing: bool = False, rows: bool = False) -> Request:
        """Make a request, and add it to the handle of this context.

        Raises LlamaHybridError in `on_request`.
        """
        self.require_outside_reports()
        view = self._outside().blank()
        view.salt = self.salt()
        view.keep_rows(rows)
        request = Request(view, completing=completing, rows=rows, salt=view.salt)
        llm = self._of()
        told = None if llm is None else llm.on_progress
        if (handle := self.handle()) is not None:
            told = handle.on_progress or told
            handle.add(request)
        if told is not None:
            request.on_progress = partial(self._tell, told)
        before = self._mine() if self.inside is None else self.inside.view
        if before is not None and before.handoff and before.salt == request.salt:
            request.rests_on = before.native
        return request

    def drive(
        self, request: Request, start: Callable[[], Generator[Any, Any, None]]
    ) -> Generator[Any, Any, None]:
        """Run a generator in steps of a request, which ends with it."""
        inner: Generator[Any, Any, None] | None = None
        running: Request | None = None
        try:
            sent = None
            while True:
                here = self._here  # whichever thread advances it
                outer = here.running and self.inside
                if outer is not None and outer is not request and outer.salt != request.salt:
                    raise LlamaHybridError("a request of one salt cannot be part of one that has another")
                if inner is None:
                    request.view.seed = secrets.randbits(32) if request.salt else self.seed
                    inner = start()
                if outer is None and request.progress is not None and request.view.busy:
                    here.view = self._shown = request.view
                    here.last = self._last = request
                try:  # a step, without a further call for each token
                    running = here.running = request
                    running.entered, running.reader = True, here.mark
                    item = inner.send(sent)
                except StopIteration:
                    return
                finally:
                    request.entered, running, here.running = False, None, outer
                sent = yield item
        finally:
            try:
                if inner is not None:
                    self.step(request, inner.close)
            finally:
                self.end(request)

    def begin(self, request: Request, reset: bool) -> None:
        """Give a new request its view; `reset` False: it continues this thread's view."""
        self._limit(request)
        before = self._outside()
        _, outer, *_ = *self._steps(), None, None
        if outer is not None:
            before = outer.view
        if reset:
            view = request.view
            mine = before is self._mine() or outer is not None
            if mine and before.salt == request.salt and request.rests_on is None:
                request.source = before
        else:
            request.rests_on = None
            view = before.fork() if before.busy or outer is not None else before
            view.seed = request.view.seed
        view.busy = True
        request.view = view
        if outer is None:
            self.show(view)
        else:
            self._here.view = view

    def _limit(self, request: Request) -> None:
        if self.wait is not True and request.after is None:
            request.deadline = time.monotonic() + float(self.wait)

    def end(self, request: Request) -> None:
        """End a request; errors of its end are raised here."""
        request.view.busy = False
        if self.several:
            request.view.sampler = None  # else `sample` ignores its arguments
        if self.loop is not None:
            self.loop.end(request, wait=request.begun and not collecting())

    def alone(self, begin: Callable[[Slot], Result], salt: bytes | None = None) -> Any:
        """Run a single operation (eval, reset): as part of the current request, or as one of its own.

        `salt`: its salt; None: that of the calling context.
        """
        assert self.loop is not None, "upstream decodes"
        self.require_outside_reports()
        if (request := self.inside) is not None and not self._awaits(request):
            return self.loop.run(request, begin)
        request = Request(self.own, salt=self.salt() if salt is None else salt)
        request.prompt = request.view.ids()
        self._limit(request)
        try:
            return self.step(request, self.loop.run, request, begin)
        finally:
            request.over = True

    def whole(self, work: Callable[[], Result], completing: bool = False, rows: bool = False) -> Result:
        """Run an operation on the whole context, in the loop's thread, while no other request has a slot."""
        loop = self.loop
        assert loop is not None, "upstream decodes"
        self.require_outside_reports()
        if loop.here:
            return work()
        if self.inside is not None and self.several:
            raise LlamaHybridError("the whole context is not available inside a request with several slots")
        request = Request(self.own, completing=completing, rows=rows, salt=self.salt())
        if (handle := self.handle()) is not None:
            handle.add(request)
        request.prompt, request.whole, request.reader = request.view.ids(), True, self._here.mark
        request.view.seed = self.next_seed()
        self._limit(request)
        context, inner = copy_context(), list[Request | None]()

        def begin(slot: Slot) -> tuple[Result]:
            loop.slots.empty_others()
            slot.claim()
            self._here.last = None
            try:
                return (self.step(request, context.run, work),)  # a tuple: a generator would be steps
            finally:
                inner.append(self._here.last)

        try:
            (result,) = loop.run(request, begin)
            return result  # type: ignore[no-any-return]
        finally:
            for last in inner:
                self._here.last = last or self._here.last
            request.over = True
            if self.inside is None or self.inside.view is request.view:  # else of a signal handler
                self.show(request.view)

    def beside(self, work: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """Run work that needs no slot, piece by piece, between batches of other requests.

        Raises RequestCancelled after `cancel`, ModelClosed, LlamaHybridError in `on_request`.
        """
        self.require_outside_reports()
        if self.loop is None or self.loop.here:
            yield from (each() for each in work)
            return
        request = Request(View(), salt=self.salt())
        if (handle := self.handle()) is not None:
            handle.add(request)
        try:
            self._calling.add(request)
            for each in work:
                yield self.loop.call(request, each)
        finally:
            request.over = True
            self._calling.discard(request)

    # -- salts -------------------------------------------------------------------------------------

    def handle(self) -> RequestHandle | None:
        """The handle of requests that are made in this context."""
        return handle_here(self)

    def salt(self) -> bytes:
        """Digest of the salt of requests in this context; inside a request its own."""
        if (request := self.inside) is not None:
            return request.salt
        handle = self.handle()
        return SHARED if handle is None else handle.salt

    def next_seed(self) -> int:
        """Seed from which upstream draws the next request's; random with a salt, to hide other requests'."""
        return secrets.randbits(32) if self.salted and self.salt() else self.seed

    def handle_for(self, salt: bytes | None) -> RequestHandle:
        """Make a handle for requests with a salt, given by its digest; None: the salt of this context.

        Raises LlamaHybridError inside a request of another salt.
        """
        here = self.salt()
        salt = here if salt is None else salt
        if salt != here and self.inside is not None:
            raise LlamaHybridError("a request inside another one has the same salt")
        self.salted |= salt != SHARED
        return RequestHandle(self, salt=salt)

    def stream(self, made: Iterator[Any]) -> Iterator[Any]:
        """Keep the salt of this context for the later requests of a stream."""
        handle, salt = self.handle(), self.salt()
        return advanced_for(RequestHandle(self, handle, salt).entered(), made)

    def refuse_salt(self) -> None:
        """Raise LlamaHybridError for a salt where there is no prompt cache."""
        if self.salted and self.salt():
            raise LlamaHybridError("upstream's own reuse knows no cache_salt: leave out prompt_cache=False")

    # -- cancelling and reports --------------------------------------------------------------------

    def cancel(self, request: Request | None = None) -> None:
        """Cancel a request, or all; takes no lock, so that a signal handler may call it."""
        if self.loop is not None and request is not None:
            self.loop.cancel(request)
        elif self.loop is not None:
            self.loop.cancel_all()
            for each in list(self._calling):
                self.loop.cancel(each)

    @property
    def last(self) -> Progress | None:
        """The progress for `last_request`: the calling thread's last request, or else that of any thread.

        Requests of other salts than this context's are left out, except the thread's own outside of a salt.
        """
        own = self._here.last
        salt = self.salt() if self.salted else SHARED
        if own is not None and own.progress is not None and salt in (SHARED, own.salt):
            return own.progress
        last = self._last
        return last.progress if last is not None and last.salt == salt else None

    def note(self, request: Request) -> None:
        """Make this request the `last_request` of this thread, and of threads without one."""
        self._last = self._here.last = request

    def report(self, progress: Progress) -> RequestReport:
        """Return the report of a request."""
        llm = self._of()
        assert llm is not None, "the caller holds it"
        return progress.report(partial(text_of_token, llm._model), explain=llm._explain)

    def reporter(self) -> Callable[[Request], None]:
        """Return a function that calls `on_request`, for the loop, which must not keep its model alive."""
        of = self._of

        def report(request: Request) -> None:
            llm = of()
            if llm is not None and llm.on_request is not None and request.progress is not None:
                llm.requests._tell(llm.on_request, llm.requests.report(request.progress))

        return report

    def _tell(self, told: Callable[[Any], None], item: Any) -> None:
        """Call `told(item)`, which must not use the model."""
        self._here.telling = True
        try:
            told(item)
        finally:
            self._here.telling = False

    def require_outside_reports(self) -> None:
        """Raise LlamaHybridError inside `on_request` and `on_progress`, which run in the loop's thread.

        Also in finalizers that the garbage collector runs there, inside an operation.
        """
        if self._here.telling:
            raise LlamaHybridError("on_request and on_progress cannot use their model: use it afterwards")
        if self.loop is not None and self.loop.here and (self.inside is None or collecting()):
            raise LlamaHybridError("a finalizer in the decode loop's thread cannot use its model")


_STEPS = {Requests.step.__code__, Requests.drive.__code__}
"""The code of frames whose `running` is the request of a step."""
