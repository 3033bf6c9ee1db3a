"""Identity: the computation and salt that the states of a live sequence are valid for."""

from __future__ import annotations

from dataclasses import replace

from llamahybrid.memory.fingerprint import Computation, salt_tag, with_salt
from llamahybrid.memory.paging import Pager
from llamahybrid.memory.segment import Splitter
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import HERE_ONLY


class Identity:
    """The name under which states of one sequence are stored."""

    def __init__(self, computation: Computation, state: SequenceState, pager: Pager | None) -> None:
        self.computation = computation
        """The model, engine and parameters."""
        self.salt = b""
        """Digest of the salt of its requests; empty: the shared default."""
        self._state = state
        self.splitter = None if pager is None else Splitter(pager.layout)
        """Splits stored attention of this layout."""
        self._rename(computation.fingerprint)

    def _rename(self, unsalted: bytes) -> None:
        self._unsalted = unsalted
        self.fingerprint = with_salt(unsalted, self.salt)
        """Compared with `is`: each change brings another object."""

    @property
    def namespace(self) -> str:
        """The fingerprint in the prompt cache and in sealed states."""
        return self.namespace_of(self.salt)

    def namespace_of(self, salt: bytes) -> str:
        """Return the namespace for requests of a salt: the computation, then the salt."""
        name = self._unsalted.hex() + (f"+{salt_tag(salt)}" if salt else "")
        return name + (HERE_ONLY if self.computation.nameless else "")

    def serves(self, salt: bytes) -> bool:
        """The sequence belongs to requests of this salt, and its name says so."""
        return self.salt == salt and self.fingerprint == with_salt(self._unsalted, salt)

    def serve(self, salt: bytes) -> None:
        """Change the salt of the next requests. Raises ValueError with live tokens."""
        if self._state.n:
            raise ValueError("the live tokens belong to requests of another salt")
        self.salt = salt
        self._rename(self._unsalted)
        while self.computation.fingerprint != self._unsalted:
            self._rename(self.computation.fingerprint)  # changed by another thread

    def computed_by(self, computation: Computation) -> None:
        """Change the computation: live tokens may be continued, but are never stored.

        Safe beside a thread that decodes: its stored states have the old name, or an unknown first token.
        """
        self.computation = computation
        if computation.fingerprint == self._unsalted:
            return
        self._state.disown()
        self._rename(computation.fingerprint)

    def verify_model(self) -> None:
        """Change the computation if a mapped model file was written to."""
        if self.computation.model.edited():
            self.computed_by(replace(self.computation))
