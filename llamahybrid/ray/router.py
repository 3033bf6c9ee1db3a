"""A request router for Ray Serve, which runs it in each process that sends requests to the replicas.

Source: the public names of `ray.serve.request_router`, Ray 2.60.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llamahybrid.ray.choice import Candidate, in_order
from llamahybrid.ray.conversations import NO_HINTS, Hints

TRUST_SECONDS = 10.0
"""A request counts as known at its replica for this time; by then the replica has reported it."""

MOST_LINKS = 50_000
MOST_SESSIONS = 10_000


class ResumableRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that can resume most of it, weighed against queues (see `choice`)."""

    queue_len_response_deadline_s = 2.0
    """A busy replica answers slowly; going to another one would cost decoding the whole prompt."""

    def initialize_state(self, slots: int = 1, **_: Any) -> None:
        """`slots`: requests that run at once on a replica."""
        self._slots = slots
        self._sent: OrderedDict[int, tuple[ReplicaID, float]] = OrderedDict()  # by link
        self._sessions: OrderedDict[str, ReplicaID] = OrderedDict()
        self._conversations: OrderedDict[int, ReplicaID] = OrderedDict()  # by the first link of their own

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, each in a rank of its own, best first."""
        hints = _hints(pending_request)
        counts = list(self._conversations.values())
        candidates = [
            Candidate(
                replica.replica_id,
                self.replica_queue_len_cache.get(replica.replica_id) or 0,
                self._known(replica, hints),
                counts.count(replica.replica_id),
            )
            for replica in candidate_replicas
        ]
        session = self._sessions.get(hints.session) if hints.session else None
        order = in_order(candidates, hints, self._slots, session)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        return [[by_id[each]] for each in order]

    def _known(self, replica: RunningReplica, hints: Hints) -> set[int]:
        """The links of a request that a replica can resume, by its report and by recent routing."""
        told = set((replica.routing_stats or {}).get("resumable", ()))
        since = time.monotonic() - TRUST_SECONDS
        sent = ((link.name, self._sent.get(link.name)) for link in hints.chain)
        fresh = {name for name, at in sent if at and at[0] == replica.replica_id and at[1] > since}
        return fresh | told.intersection(link.name for link in hints.chain)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember the replica of this conversation."""
        hints, now = _hints(pending_request), time.monotonic()
        for link in hints.chain:
            _remember(self._sent, link.name, (replica_id, now), MOST_LINKS)
        own = next((link.name for link in hints.chain if link.own), None)
        if own is not None:
            _remember(self._conversations, own, replica_id, MOST_SESSIONS)
        if hints.session:
            _remember(self._sessions, hints.session, replica_id, MOST_SESSIONS)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica; its conversations may be in the shared store."""
        super().on_replica_actor_died(replica_id)
        for link in [n for n, (there, _) in self._sent.items() if there == replica_id]:
            del self._sent[link]
        for session in [s for s, there in self._sessions.items() if there == replica_id]:
            del self._sessions[session]
        for first in [c for c, there in self._conversations.items() if there == replica_id]:
            del self._conversations[first]


def _remember(kept: OrderedDict[Any, Any], name: Any, value: Any, most: int) -> None:
    kept[name] = value
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)


def _hints(pending: PendingRequest | None) -> Hints:
    args = pending.args if pending is not None else ()
    hints = getattr(args[0], "hints", None) if args else None
    return hints if isinstance(hints, Hints) else NO_HINTS
