"""Runs a workload on a session and records each request with its chat and answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count

from llamahybrid.harness.conversation import Answer, Request
from llamahybrid.harness.targets.base import Reply, Session
from llamahybrid.harness.workloads.speech import Speech, Vocabulary, spelled
from llamahybrid.harness.workloads.tokens import Workload

TEXT_ALONE = Vocabulary(tuple(range(16)), None, None)
"""Vocabulary for sessions that take no tokens; workloads of chats are sentences."""


@dataclass(frozen=True)
class RequestResult:
    """A request and its answer."""

    request: Request
    reply: Reply
    turn: int
    """Of its chat, from 0."""
    number: int = 0
    """Of its client, from 0."""
    sent: float = 0.0

    @property
    def chat(self) -> str:
        """The name of its chat."""
        return self.request.chat

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt; empty: unknown."""
        return self.reply.prompt or ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All decoded tokens; the last token of an answer is never decoded."""
        return self.prompt + (self.reply.tokens or ())[:-1]


Told = Callable[[RequestResult], None]


NO_TOKENS = "the target takes no token ids"

LEAST = 2
"""Requests of each client that are sent whatever the time: fewer show no reuse."""


def unsuited(session: Session, workload: Workload) -> str | None:
    """Return the reason why a session does not take a workload's requests; None: it does."""
    if workload.template:
        return None if session.takes_chats else "there is no chat template"
    return None if session.takes_tokens else NO_TOKENS


class WorkloadRunner:
    """Sends requests, also of several clients at once, and records them."""

    def __init__(self, session: Session, told: Told | None = None, until: float | None = None) -> None:
        """`told` is called with each request; after `until`, a `time.monotonic()`, only `LEAST` begin."""
        self.session = session
        self._told, self._until = told, until
        self._ended = threading.Event()
        self.cut_short = False
        """True if requests were left out for lack of time."""
        self._turns: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.played: list[RequestResult] = []

    def ask(self, request: Request, number: int = 0) -> Reply:
        """Send a request. Raises TargetError."""
        salt = "" if self.session.salts is False else request.salt  # without salts everything is shared
        request = replace(request, chat=request.chat or "0", salt=salt)
        with self._lock:
            turn = self._turns[request.chat]
            self._turns[request.chat] += 1
        sent = time.monotonic()
        reply = self.session.ask(request)
        played = RequestResult(request, reply, turn, number, sent)
        with self._lock:
            self.played.append(played)
        if self._told is not None:
            self._told(played)
        return reply

    def converse(self, workload: Workload, scale: float = 1.0) -> Sequence[RequestResult]:
        """Play a workload with all its clients, its messages and answers shortened by `scale`.

        Return the requests in the order of sending. Raises TargetError.
        """
        clients = [self._client(workload, str(i), scale) for i in range(workload.clients)]
        if self.session.parallel > 1 and len(clients) > 1:
            with ThreadPoolExecutor(len(clients)) as pool:
                try:
                    for each in [pool.submit(list[bool], client) for client in clients]:
                        each.result()
                except BaseException:  # threads end after their current request
                    self._ended.set()
                    raise
        else:
            while clients:
                clients = [client for client in clients if next(client, False)]
        return sorted(self.played, key=lambda each: each.sent)

    def _client(self, workload: Workload, name: str, scale: float) -> Iterator[bool]:
        """Send the requests of a client, one a step; fewer if there is no time."""
        session = self.session
        seed = f"{session.nonce}/{name}" if session.nonce else int(name)
        vocabulary = session.vocabulary or TEXT_ALONE
        speech = Speech(vocabulary, seed=seed, marked=workload.marked, scale=scale)
        conversation = workload.start(speech)
        request = next(conversation, None)
        for number in count():
            late = number >= LEAST and self._until is not None and time.monotonic() > self._until
            if request is None or late or self._ended.is_set():
                self.cut_short |= request is not None and late
                return
            if request.tokens and not session.takes_tokens:  # of a directed probe
                messages = [{"role": "user", "content": spelled(request.tokens)}]
                request = replace(request, tokens=(), messages=messages)
            chat = f"{name}/{request.chat}" if workload.clients > 1 and request.chat else request.chat or name
            n = speech.size(request.max_tokens)
            reply = self.ask(replace(request, max_tokens=n, chat=chat), number)
            try:
                request = conversation.send(answer_of(session, reply))
            except StopIteration:
                return
            yield True


_PIECES = 100


def answer_of(session: Session, reply: Reply) -> Answer:
    """Return a reply as a client gets it; without token ids, its text in a hundred pieces."""
    if reply.tokens is not None:
        return Answer(reply.tokens, lambda tokens: session.spell(tokens, special=False) or "")
    text = reply.text
    bounds = [len(text) * i // _PIECES for i in range(_PIECES + 1)]

    def pieces(tokens: Sequence[int]) -> str:
        return "".join(text[bounds[i] : bounds[i + 1]] for i in tokens)

    return Answer(tuple(range(_PIECES)), pieces)
