"""Models by alias, one open at a time, as llama_cpp.server has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.server.errors import Refusal
from llamahybrid.server.settings import ModelSettings

if TYPE_CHECKING:
    from llamahybrid.events.publisher import EventPublisher

logger = logging.getLogger("llamahybrid.server")


class Models:
    """Which models there are, and the one that is open. `open` and `close` block; one thread at a time."""

    def __init__(self, settings: Sequence[ModelSettings], load: Callable[..., Llama]) -> None:
        """`load(settings)`, and `load(settings, cache)` for one that goes on with what another one had.

        Raises ValueError for no model, or for two of one name.
        """
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
        self._events: EventPublisher | None = None
        self._kept: tuple[str, PromptCache | None] | None = None
        """The alias of a model that was lost, and what it had in RAM, until it is open again."""

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
        """The model of that alias. One that is open is closed, which writes what waits for the disk.

        So is one whose RPC server is gone; it is opened again, with what it had in RAM. Raises DeviceError
        while the server is not back.
        """
        llm = self._llm
        if llm is not None and self.current == alias:
            if not llm.offload.lost:
                return llm
            self._kept = alias, llm.prompt_cache
        self.close()
        logger.info("opening %s", alias)
        kept = [self._kept[1]] if self._kept is not None and self._kept[0] == alias else []
        self._llm = self._load(self._settings[alias], *kept)
        self.current, self._kept = alias, None
        try:
            self._events = published(self._llm, self._settings[alias])
        except BaseException:
            self.close()  # or the next request would have it, with nothing told
            raise
        return self._llm

    def close(self) -> None:
        """Close the one that is open."""
        events, self._events = self._events, None
        if events is not None:
            events.close()
        llm, self._llm, self.current = self._llm, None, None
        if llm is not None:
            llm.close()


def published(llm: Llama, settings: ModelSettings) -> EventPublisher | None:
    """What the model can resume is told to routers, where the settings say so.

    An address that is taken costs a warning: a router that hears nothing has to guess, no more.
    """
    if settings.kv_events is None:
        return None
    from llamahybrid.events.publisher import EventPublisher, ZMQError

    try:
        return EventPublisher(
            llm,
            settings.kv_events,
            replay=settings.kv_events_replay,
            topic=settings.kv_events_topic,
            block_size=settings.kv_block_size,
        )
    except ZMQError as error:
        logger.warning("KV events are not published at %s: %s", settings.kv_events, error)
        return None
