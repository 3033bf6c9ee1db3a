"""Service: the models, their queue and threads, metrics and history; called by the routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, Metric
from starlette.requests import Request

from llamahybrid.client.salt import digest
from llamahybrid.llama import Llama
from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.prompt_cache.base import OUTSIDE
from llamahybrid.server.admission import Admission, Place
from llamahybrid.server.answer import Answer, unless_gone
from llamahybrid.server.bodies import Body, RequestBody
from llamahybrid.server.completion import make_answer, prompts_of
from llamahybrid.server.errors import bad, later
from llamahybrid.server.job import FOREVER, Chunk, End, Job, Outbox
from llamahybrid.server.keyed_prompts import KeyedPrompts
from llamahybrid.server.keys import Viewer, Viewers, salt_of_request
from llamahybrid.server.loading import load
from llamahybrid.server.metrics import Metrics, gauge
from llamahybrid.server.models import Models
from llamahybrid.server.prompts import Observer, PromptRules
from llamahybrid.server.request_fields import require_known
from llamahybrid.server.settings import ModelSettings, ServerSettings
from llamahybrid.server.usage import summary

logger = logging.getLogger("llamahybrid.server")

Result = TypeVar("Result")

MOST_REQUESTS = 100
"""Requests in the history."""

LARGE_BYTES = 64 << 10
"""Size of a large request body."""

MOST_THREADS = 1024
"""Most threads; each is started when needed, and no more requests run than there are slots."""


class Service:
    """The models of one server and their requests, in one event loop from `start` to `stop`."""

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ModelSettings],
        loader: Callable[[ModelSettings], Llama] = load,
    ) -> None:
        """Open no model yet. Raises ValueError for contradictory settings."""
        if settings.salt_by_key and not settings.keys():
            raise ValueError("salt_by_key: there are no API keys")
        self.settings = settings
        self.models = Models(models, loader, settings.models_bytes)
        self.admission = Admission(self.models, settings.max_queue, settings.idle_seconds)
        self.metrics = Metrics(self._state)
        self.admission.on_refused = partial(self.metrics.refused, "queue")
        self._viewers = Viewers(settings)
        self.history: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_REQUESTS)
        """The last requests, the newest first: the tag of the salt (`salt_tag`), and `summary`."""
        self.observer: Callable[[Request], Observer | None] = lambda _: None
        """Returns the function that gets the ids of a request's prompts, in its thread; None: none does."""
        self.jobs: dict[Job, str] = {}
        """Running jobs, oldest first, with the alias of their model."""
        self._beside = 0
        """Requests without a slot, waiting ones included."""
        self._keyed: dict[str, KeyedPrompts] = {}
        """By the alias of the model."""
        self._outbox: Outbox
        self._stopping: asyncio.Future[None] | None = None
        self._threads = ThreadPoolExecutor(MOST_THREADS, "llamahybrid-request")
        if settings.interrupt_requests:
            self.admission.on_crowd = self._interrupt

    # -- from start to stop ------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the default model."""
        self._outbox = Outbox(asyncio.get_running_loop())
        await self.use(None, lambda llm: None)

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and cancel running ones after some seconds."""
        self.admission.refuse_waiting()
        asyncio.get_running_loop().call_later(seconds, self.cancel_all)

    def cancel_all(self) -> None:
        """Cancel all requests; each client gets its answer so far."""
        for job in list(self.jobs):
            job.cancel()

    async def stop(self) -> None:
        """Cancel all requests and close the models, with pending writes to disk. Repeatable."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self.admission.refuse_waiting()
        self.cancel_all()
        await self.admission.close()
        self._threads.shutdown(wait=False)

    def _interrupt(self, alias: str) -> None:
        """Cancel the longest-running stream for a waiting request (`interrupt_requests`).

        A stream of its model if that is open; otherwise any, since another model may have to close.
        """
        is_open = alias in self.models.opened
        for job, model in self.jobs.items():
            if job.stream and not job.cancelled and (model == alias or not is_open):
                job.cancel()
                return

    # -- requests ----------------------------------------------------------------------------------

    async def answer(self, request: Request, asked: RequestBody) -> Answer:
        """Answer a request when its turn comes. Raises Refusal."""
        arrived = time.perf_counter()
        ignore = self.settings.ignore_unknown_fields
        require_known(asked, ignore)
        body: Body = asked.completion()
        check = partial(self.require, body)
        if int(request.headers.get("content-length", LARGE_BYTES)) < LARGE_BYTES:
            check()
        else:  # its schemas may take a second
            await asyncio.get_running_loop().run_in_executor(self._threads, check)
        alias = self.models.alias(body.model)
        named = self.salt(request, body.cache_salt)
        prompts = prompts_of(body)
        llm, place = await self._enter(request, alias, (body.n or 1) * prompts)
        try:
            if llm.model_params.vocab_only:
                raise bad("this model was opened for its vocabulary alone (vocab_only)", "model")
            tag = salt_tag(digest(named))
            observers = tuple(self._observers(request, body, llm, alias, tag))
            rules = PromptRules(self.settings.max_prompt_tokens, observers)
            form = asked.answer_format(llm, asked, alias)
            create = partial(make_answer, form, body, rules, ignore)
            progress = form.progress if body.return_progress else None
            over = partial(self._over, arrived, place, tag, prompts)
            job = Job(create, body.stream, partial(llm.request, named), over, self._outbox, progress)
            self.jobs[job] = alias
            job.start(self._threads)
        except BaseException:
            self.admission.leave(place)
            raise
        return Answer(job, form, self._ping_seconds)

    def salt(self, request: Request, said: str | None) -> str:
        """Return the salt of a request with this `cache_salt`. Raises Refusal for a missing one."""
        key = getattr(request.state, "api_key", None)
        named = salt_of_request(said, key, self.settings.salt_by_key)
        if self.settings.require_salt and not named:
            raise bad("this server takes no requests without a cache_salt", "cache_salt")
        return named

    def viewer(self, request: Request) -> Viewer:
        """Return the access rights of a request's key."""
        return self._viewers.of(getattr(request.state, "api_key", None))

    def require(self, body: Any) -> None:
        """Raise Refusal for a completion or chat that cannot be answered."""
        require_known(body, self.settings.ignore_unknown_fields)
        body.require_supported(self.settings.max_n, self.settings.max_logprobs)

    def _observers(
        self, request: Request, body: Body, llm: Llama, alias: str, tag: str
    ) -> Iterator[Observer]:
        """Yield the functions that get the ids of a request's prompts."""
        if (observe := self.observer(request)) is not None:
            yield observe
        if body.prompt_cache_key and llm.prompt_cache is not None:
            keyed = self._keyed.setdefault(alias, KeyedPrompts(llm.prompt_cache))
            yield partial(keyed.note, tag, body.prompt_cache_key)

    async def use(self, model: str | None, work: Callable[[Llama], Result]) -> Result:
        """Run `work` on a model in a thread, without a slot. Raises Refusal, and the errors of `work`."""
        return await asyncio.shield(self._run(work, *await self.admission.enter(self.models.alias(model), 0)))

    async def use_slot(
        self,
        request: Request,
        model: str | None,
        work: Callable[[Llama], Chunk],
        salt: str = "",
        slots: int = 1,
    ) -> Chunk:
        """Run `work` in slots of a model, in a thread. Raises Refusal.

        `slots`: 0 for work in parallel to requests; max_queue + 1 of that may run at once. Its requests, with
        this salt, are dropped if the client disconnects.
        """
        beside, alias = not slots, self.models.alias(model)
        if beside and self._beside > self.settings.max_queue:
            self.metrics.refused("queue")
            raise later("too many requests for embeddings; ask again later", 1, 429)
        self._beside += beside

        def over(job: Job, _: End) -> None:
            self._beside -= beside
            self.jobs.pop(job, None)
            self.admission.leave(place)

        try:
            llm, place = await self._enter(request, alias, slots)
        except BaseException:
            self._beside -= beside
            raise
        job = Job(lambda stream: work(llm), False, partial(llm.request, salt), over, self._outbox)
        self.jobs[job] = alias
        job.start(self._threads)
        try:
            return await unless_gone(request.receive, asyncio.ensure_future(job.whole()))
        finally:
            job.drop()

    def slots_to_embed(self, model: str | None) -> int:
        """Return the slots for embedding texts: none if the model is open and embeds in parallel to chats."""
        opened = self.models.opened.get(self.models.alias(model))
        return 0 if opened is not None and opened.llm.requests.loop is not None else 1

    def _run(self, work: Callable[[Llama], Result], llm: Llama, place: Place) -> asyncio.Future[Result]:
        """Run `work` in a thread, and leave the place afterwards."""
        made = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work, llm)
        made.add_done_callback(lambda _: self.admission.leave(place))
        return made

    async def look(self, see: Callable[[Llama], Result], alias: str | None = None) -> Result | None:
        """Return `see(model)` of an open model, in a thread; None if it is closed, or about to close.

        `alias`: None for the model that was used last.
        """
        if (visit := self.admission.visit(alias)) is None:
            return None
        return await asyncio.shield(self._run(see, *visit))

    async def _enter(self, request: Request, alias: str, slots: int) -> tuple[Llama, Place]:
        """Wait for a place. Raises Refusal, also if the client disconnects."""
        entering = asyncio.ensure_future(self.admission.enter(alias, slots))
        try:
            return await unless_gone(request.receive, entering)
        except BaseException:
            entering.add_done_callback(self._give_back)  # the cancellation may come too late
            raise

    def _give_back(self, entered: asyncio.Future[tuple[Llama, Place]]) -> None:
        """Leave a place whose client has left."""
        if not entered.cancelled() and entered.exception() is None:
            self.admission.leave(entered.result()[1])

    def _over(self, arrived: float, place: Place, tag: str, prompts: int, job: Job, last: End) -> None:
        self.jobs.pop(job, None)
        self.admission.leave(place)
        end = "cancelled" if job.cancelled else "done" if last.error is None else "failed"
        waited = job.started - arrived
        self.metrics.answered(last.reports, waited, end, prompts)
        self.history.appendleft((tag, summary(last.reports, last.reasons, waited, end)))

    @property
    def _ping_seconds(self) -> float:
        return FOREVER if self.settings.disable_ping_events else self.settings.ping_seconds

    # -- metrics -----------------------------------------------------------------------------------

    def _state(self) -> Iterator[Metric]:
        opened, admission = self.models.opened, self.admission
        busy = sum(len(each.llm.slots.seated) for each in opened.values())
        left = [report.unreached for job in list(self.jobs) for report in job.reports if report.unreached]
        yield gauge("llamacpp:requests_processing", "Number of requests processing.", admission.running)
        yield gauge("llamacpp:requests_deferred", "Number of requests deferred.", admission.waiting)
        yield gauge("llamahybrid:slots", "Requests that can run at once.", admission.slots)
        yield gauge("llamahybrid:slots_busy", "Slots in use.", busy)
        yield gauge("llamahybrid:prompts_processing", "Prompts in decoding.", len(left))
        yield gauge("llamahybrid:prompt_tokens_left", "Tokens of these prompts to decode.", sum(left))
        is_open = {alias: float(alias in opened) for alias in self.models}
        yield gauge("llamahybrid:model_open", "Whether a model is open.", is_open, "model")
        stats = {alias: cache.stats() for alias, cache in self.models.caches.items()}
        tiers = {"ram": float(sum(kept.bytes_ram for kept in stats.values()))}
        for name in OUTSIDE:
            # several models may share a folder, or a server
            held = {self.models.place(alias, name): kept for alias, kept in stats.items()}
            tiers[name] = sum(kept.extra.get(f"{name}_bytes", 0) for kept in held.values())
            failed = sum(kept.extra.get(f"{name}_errors", 0) for kept in stats.values())
            text = "Failed reads and writes of this tier since its model was first opened."
            yield CounterMetricFamily(f"llamahybrid:cache_{name}_errors", text, failed)
        yield gauge("llamahybrid:cache_bytes", "Stored bytes, by tier.", tiers, "tier")
