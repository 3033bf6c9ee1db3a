"""Identity: what computes a live sequence, and so what its states are valid for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamahybrid.memory.paging import Pager, Splitter
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import HERE_ONLY

if TYPE_CHECKING:
    from llamahybrid.memory.fingerprint import Computation


class Identity:
    """The name that states of one context are stored under."""

    def __init__(self, fingerprint: bytes, state: SequenceState, pager: Pager | None) -> None:
        """`fingerprint`: 16 bytes naming what stored state is valid for."""
        self.computation: Computation | None = None
        """What computes; None: what `fingerprint` names stays."""
        self._state = state
        self._pager = pager
        self._rename(fingerprint)

    def _rename(self, fingerprint: bytes) -> None:
        pager = self._pager
        self.splitter = Splitter(pager.layout, fingerprint) if pager is not None else None
        """Cuts stored attention of this name in two."""
        self.fingerprint = fingerprint
        """Compared with `is`: each change brings another object."""

    @property
    def namespace(self) -> str:
        """The fingerprint as the prompt cache knows it."""
        nameless = self.computation is not None and self.computation.nameless
        return self.fingerprint.hex() + (HERE_ONLY if nameless else "")

    def computed_by(self, computation: Computation) -> None:
        """From now on something else computes: what is live can be gone on from, and is never stored.

        Safe beside a thread that decodes: whatever it stores has the old name, or an unknown first token.
        """
        self.computation = computation
        if computation.fingerprint == self.fingerprint:
            return
        self._state.disown()
        self._rename(computation.fingerprint)

    def verify_model(self) -> None:
        """Notice that somebody has written to the files that the model is mapped from."""
        if self.computation is not None and self.computation.model.edited():
            self.computed_by(replace(self.computation))
