"""Batches of one sequence that another thread can stop; a stopped batch is undone."""

from __future__ import annotations

from llamahybrid.capi.shim import Stop
from llamahybrid.core.batch import Decode
from llamahybrid.core.request import Request
from llamahybrid.core.slots import Slots
from llamahybrid.memory.restore import recover
from llamahybrid.prompt_cache.base import Bytes


class StoppableBatches:
    """Decodes batches of one sequence each; `stop` ends the running one."""

    def __init__(self, slots: Slots) -> None:
        self._flag = Stop()
        for slot in slots:
            slot.executor.live.native.set_stop(self._flag)

    def stop(self, request: Request) -> None:
        """Stop the batch that is decoded for a request, if any; from any thread, or a signal handler."""
        self._flag.request(request.number)

    def decode(self, request: Request, wanted: Decode) -> None:
        """Decode the next batch of one sequence.

        A single token, or a draft, is never stopped: it takes little time, and needs no copy of the state to
        undo it. Raises DecodeError; the sequence is then as before.
        """
        if wanted.step:
            wanted.live.decode(wanted.tokens, wanted.outputs)
            return
        live, tokens, outputs = wanted.part
        if wanted.count == 1 or not wanted.prompt:
            live.decode(tokens, outputs)
            return
        undo = live.n, _state(request, wanted)
        request.number = self._flag.begin()
        if request.cancelled:
            self._flag.request(request.number)
        try:
            live.decode(tokens, outputs)
        except BaseException:
            if live.state.is_invalid:
                recover(live, undo)
            raise
        finally:
            self._flag.end()


def _state(request: Request, wanted: Decode) -> Bytes | None:
    """The state before a batch, where memory cannot be cut back to it."""
    live, progress = wanted.live, request.progress
    if not live.profile.needs_checkpoints:
        return None
    if progress is not None and progress.staged and progress.staged[-1][0] == live.n:
        return progress.staged[-1][1]
    return live.snapshot(live.shared.undo_buffer, deep=False)
