"""Models by alias, one open at a time, as llama_cpp.server has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from llamahybrid.llama import Llama
from llamahybrid.server.errors import Refusal
from llamahybrid.server.settings import ModelSettings

logger = logging.getLogger("llamahybrid.server")


class Models:
    """Which models there are, and the one that is open. `open` and `close` block; one thread at a time."""

    def __init__(self, settings: Sequence[ModelSettings], load: Callable[[ModelSettings], Llama]) -> None:
        """Raises ValueError for none, or for two of one name."""
        self._settings: dict[str, ModelSettings] = {}
        for each in settings:
            alias = (
                each.model_alias or PurePath(each.model.replace("\\", "/")).name
            )  # no path of this machine
            if alias in self._settings:
                raise ValueError(f"two models are called {alias!r}; give each a model_alias of its own")
            self._settings[alias] = each
        if not self._settings:
            raise ValueError("no model was given")
        self._load = load
        self.default = next(iter(self._settings))
        self.current: str | None = None
        """The alias of the open one."""
        self._llm: Llama | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def alias(self, name: str | None) -> str:
        """Which model a request means: as upstream's, the default for a name that nobody gave one.

        Raises Refusal for a path: a request opens no files.
        """
        if name is None or name in self._settings:
            return name or self.default
        if "/" in name or "\\" in name or name.endswith(".gguf"):
            logger.warning("refused: a request named a file as its model")
            raise Refusal(404, "there is no such model; /v1/models lists them", code="model_not_found")
        return self.default

    @property
    def llm(self) -> Llama | None:
        """The open one."""
        return self._llm

    def open(self, alias: str) -> Llama:
        """The model of that alias. One that is open is closed, which writes what waits for the disk."""
        if self._llm is not None and self.current == alias:
            return self._llm
        self.close()
        logger.info("opening %s", alias)
        self._llm = self._load(self._settings[alias])
        self.current = alias
        return self._llm

    def close(self) -> None:
        """Close the one that is open."""
        llm, self._llm, self.current = self._llm, None, None
        if llm is not None:
            llm.close()
