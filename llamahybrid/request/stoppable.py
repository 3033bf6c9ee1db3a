"""StoppableBatches: batches of a prompt that a cancel may stop inside; all before such a batch is kept."""

from __future__ import annotations

from llamahybrid.capi.calls import Outputs
from llamahybrid.errors import DecodeError
from llamahybrid.memory.restore import recover
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.request import Request

ABORTED = 2
"""Result of llama_decode when its abort callback said so (include/llama.h)."""


class StoppableBatches:
    """Decodes one native batch at a time."""

    def __init__(self, live: LiveSequence, gate: RequestGate) -> None:
        self._live = live
        self._gate = gate
        self._stop = gate.seats.stop
        live.native.set_stop(self._stop)

    def decode(self, request: Request | None, tokens: Tokens, outputs: Outputs) -> None:
        """Append tokens. Raises DecodeError, and RequestCancelled with nothing of this batch decoded.

        A single token, or a draft, is never stopped inside: it takes little time, and its undo would have to
        be taken for every one.
        """
        live = self._live
        if len(tokens) == 1 or (request is not None and not request.prefilling):
            live.decode(tokens, outputs)
            return
        undo = live.n, self._state(request)
        self._stop.arm(True)
        try:
            live.decode(tokens, outputs)
        except BaseException as error:
            if live.state.is_invalid:
                recover(live, undo)
            if isinstance(error, DecodeError) and error.code == ABORTED:
                self._gate.check()
            raise
        finally:
            self._stop.arm(False)

    def _state(self, request: Request | None) -> Bytes | None:
        """The state before a batch, where memory cannot be cut back to it."""
        live = self._live
        if not live.profile.needs_checkpoints:
            return None
        if request is not None and request.staged and request.staged[-1][0] == live.n:
            return request.staged[-1][1]
        return live.snapshot(live.shared.undo_buffer, deep=False)
