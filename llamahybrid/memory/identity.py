"""Identity: what computes a live sequence, and so what its states are valid for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamahybrid.memory.fingerprint import salt_tag, with_salt
from llamahybrid.memory.paging import Pager
from llamahybrid.memory.segment import Splitter
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
        self.salt = b""
        """Digest of the salt of the requests that it computes for; empty: the shared default."""
        self._unsalted = fingerprint
        self._state = state
        self.splitter = None if pager is None else Splitter(pager.layout)
        """Cuts stored attention of this kind in two."""
        self._rename(fingerprint)

    def _rename(self, unsalted: bytes) -> None:
        self._unsalted = unsalted
        self.fingerprint = with_salt(unsalted, self.salt)
        """Compared with `is`: each change brings another object."""

    @property
    def namespace(self) -> str:
        """The fingerprint as the prompt cache knows it, and as states are sealed with."""
        return self.namespace_of(self.salt)

    def namespace_of(self, salt: bytes) -> str:
        """The same for requests of another salt: what computes, then the salt, each told by itself."""
        nameless = self.computation is not None and self.computation.nameless
        name = self._unsalted.hex() + (f"+{salt_tag(salt)}" if salt else "")
        return name + (HERE_ONLY if nameless else "")

    def serves(self, salt: bytes) -> bool:
        """What is decoded here is that of requests of this salt, and is named so."""
        return self.salt == salt and self.fingerprint == with_salt(self._unsalted, salt)

    def serve(self, salt: bytes) -> None:
        """Requests of another salt come next. Raises ValueError where anything is live."""
        if self._state.n:
            raise ValueError("what is live belongs to requests of another salt")
        self.salt = salt
        self._rename(self._unsalted)
        while self.computation is not None and self.computation.fingerprint != self._unsalted:
            self._rename(self.computation.fingerprint)  # another thread has changed it meanwhile

    def computed_by(self, computation: Computation) -> None:
        """From now on something else computes: what is live can be gone on from, and is never stored.

        Safe beside a thread that decodes: whatever it stores has the old name, or an unknown first token.
        """
        self.computation = computation
        if computation.fingerprint == self._unsalted:
            return
        self._state.disown()
        self._rename(computation.fingerprint)

    def verify_model(self) -> None:
        """Notice that somebody has written to the files that the model is mapped from."""
        if self.computation is not None and self.computation.model.edited():
            self.computed_by(replace(self.computation))
