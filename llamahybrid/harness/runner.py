"""Runs a workload on a session and records each request with its chat and answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from llamahybrid.harness.conversation import Answer, Conversation, Request
from llamahybrid.harness.targets.base import Ask, Reply, Session
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from llamahybrid.harness.workloads.tokens import Workload

TEXT_ALONE = Vocabulary(tuple(range(16)), None, None)
"""Vocabulary for sessions that take no tokens; workloads of chats are sentences."""


@dataclass(frozen=True)
class RequestResult:
    """A request and its answer."""

    chat: str
    turn: int
    """Of that chat, from 0."""
    number: int
    """Of that client, from 0."""
    sent: float
    ask: Ask
    reply: Reply


Told = Callable[[RequestResult], None]


def suits(session: Session, workload: Workload) -> bool:
    """Tell whether the session takes the workload's requests."""
    return session.takes_chats if workload.template else session.takes_tokens


class WorkloadRunner:
    """Sends requests, also of several clients at once, and records them."""

    def __init__(self, session: Session, told: Told | None = None, until: float | None = None) -> None:
        """`told` is called with each request; no request begins after `until`, a `time.monotonic()`."""
        self.session = session
        self._told, self._until = told, until
        self._ended = threading.Event()
        self.cut_short = False
        """True if requests were left out for lack of time."""
        self._turns: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.played: list[RequestResult] = []

    def ask(self, ask: Ask, chat: str = "0", number: int = 0) -> Reply:
        """Send a request. Raises TargetError."""
        if self.session.salts is False:  # it shares everything
            ask = replace(ask, salt="")
        with self._lock:
            turn = self._turns[chat]
            self._turns[chat] += 1
        sent = time.monotonic()
        reply = self.session.ask(ask)
        played = RequestResult(chat, turn, number, sent, ask, reply)
        with self._lock:
            self.played.append(played)
        if self._told is not None:
            self._told(played)
        return reply

    def time_is_over(self) -> bool:
        """Tell that no further request may begin."""
        if self._until is not None and time.monotonic() > self._until:
            self.cut_short = True
        return self.cut_short or self._ended.is_set()

    def converse(self, workload: Workload, scale: float = 1.0) -> Sequence[RequestResult]:
        """Play a workload with all its clients, its messages and answers shortened by `scale`.

        Return the requests in the order of sending. Raises TargetError.
        """
        clients = [_Client(self, workload, i, scale) for i in range(workload.clients)]
        if self.session.parallel > 1 and len(clients) > 1:
            with ThreadPoolExecutor(len(clients)) as pool:
                try:
                    for each in [pool.submit(client.finish) for client in clients]:
                        each.result()
                except BaseException:  # threads end after their current request
                    self._ended.set()
                    raise
        else:
            while clients:
                clients = [client for client in clients if client.step()]
        return sorted(self.played, key=lambda each: each.sent)


class _Client:
    def __init__(self, player: WorkloadRunner, workload: Workload, number: int, scale: float) -> None:
        session = player.session
        seed = f"{session.nonce}/{number}" if session.nonce else number
        speech = Speech(session.vocabulary or TEXT_ALONE, seed=seed, marked=workload.marked, scale=scale)
        self._speech = speech
        self._player, self._client, self._number = player, str(number), 0
        self._several = workload.clients > 1
        self._conversation: Conversation = workload.start(speech)
        self._request: Request | None = next(self._conversation, None)

    def step(self) -> bool:
        """Send the next request; False: there is none, or no time."""
        request = self._request
        if request is None or self._player.time_is_over():
            return False
        request = replace(request, max_tokens=self._speech.size(request.max_tokens))
        chat = f"{self._client}/{request.chat}" if self._several and request.chat else request.chat
        reply = self._player.ask(Ask.of(request), chat or self._client, self._number)
        self._number += 1
        try:
            self._request = self._conversation.send(answer_of(self._player.session, reply))
        except StopIteration:
            self._request = None
        return self._request is not None

    def finish(self) -> None:
        """Send all requests."""
        while self.step():
            pass


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
