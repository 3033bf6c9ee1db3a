"""Solo: an answer that runs alone is decoded in the thread that asks for it.

To hand a token over to the compute thread and back takes 0.1 ms at the median and 0.3 in the mean, since who
is woken waits for a core on which OpenMP's team spins. With nobody else in, no batch is anybody else's, and
what Ctrl-C leaves is what it leaves with one slot.

Of OpenMP's teams there is one at a time (see `capi.openmp`). So the compute thread's ends when a thread
begins, and its own when it is not alone any more, and with its request: it may be away for long after that.
A thread that goes away in the middle of its answer, while others begin, keeps its team until it is back.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from llamahybrid.capi.openmp import team_ender
from llamahybrid.memory.shared import SharedContext
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.ticket import ThreadMark, Ticket, this_thread

TOKENS_BEFORE = 4
"""An answer's thread has asked for so many of its tokens, in a row and alone, before it decodes them itself:
one that is given up after the first, or advanced by many threads, leaves no team behind."""


class Solo:
    """Which thread decodes the tokens of an answer that runs alone."""

    def __init__(self, shared: SharedContext, gate: RequestGate) -> None:
        self._shared = shared
        self._gate = gate
        self._end_team = team_ender()
        self._process = os.getpid()
        self._counted: tuple[int, ThreadMark] | None = None
        """Which request (`Ticket.born`) and thread asked for the last token, alone."""
        self._tokens = 0
        """How many in a row."""
        self.team_of: ThreadMark | None = None
        """The thread that decodes itself, and may have a team."""

    def takes(self, ticket: Ticket, fits: Callable[[], bool]) -> bool:
        """The next token of this request, whose step it is, is decoded right here; not unless it `fits()`."""
        if not (self._gate.lonely(ticket) and fits()):
            self._counted = None
            self.end_team()
            return False
        who = ticket.born, this_thread()
        if self._counted != who:
            self._counted, self._tokens = who, 0
            self.end_team()
        self._tokens += 1
        if self._tokens <= TOKENS_BEFORE or self._process != os.getpid():  # a child has no team's threads
            return False
        if self._end_team is None:
            return False
        if self.team_of is not who[1]:
            self._shared.rest(self._end_team)
            self.team_of = who[1]
        return True

    def end_team(self, computed: bool = False) -> None:
        """The calling thread goes away, or others decode: it keeps no team. In a step or not.

        `computed`: it may have one from elsewhere, as from decoding an image.
        """
        if self.team_of is not None and self.team_of is this_thread():
            self.team_of = None
        elif not computed:
            return
        if self._end_team is not None and self._process == os.getpid():
            self._end_team()
