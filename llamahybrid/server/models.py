"""The models of a server by alias, open ones within a budget of memory, and their prompt caches."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llamahybrid.capi.gguf import Gguf
from llamahybrid.errors import EngineError
from llamahybrid.llama import Llama
from llamahybrid.memory.model_files import shards
from llamahybrid.memory.vectors import FLOAT_BYTES
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.ram import default_ram_bytes, physical_bytes
from llamahybrid.server.errors import Refusal
from llamahybrid.server.request_fields import MOST_LETTERS
from llamahybrid.server.settings import CACHE_TYPES, DEFAULT_SLOTS, ModelSettings

if TYPE_CHECKING:
    from llamahybrid.events import EventPublisher

logger = logging.getLogger("llamahybrid.server")


SHARE = 3 / 4
"""Share of physical memory for open models, by default."""

BESIDE = 1.1
"""Factor for compute buffers and recurrent states."""


class Opened(NamedTuple):
    """An open model, and the publisher of its KV events."""

    llm: Llama
    events: EventPublisher | None


class Models:
    """The models of a server. `open` and `close` block; one thread at a time.

    The prompt cache of a closed model stays until the program ends.
    """

    def __init__(
        self, settings: Sequence[ModelSettings], load: Callable[..., Llama], budget: int | None = None
    ) -> None:
        """`load(settings)`, or `load(settings, cache)` with an earlier cache, opens a model.

        `budget`: bytes for all open models (see `footprint`); None: three quarters of physical memory, or one
        model at a time if layers are offloaded. Raises ValueError for no model, or for two of one name.
        """
        self._settings: dict[str, ModelSettings] = {}
        self._names: dict[str, str] = {}
        """The alias of a model by each of its names."""
        for each in settings:
            file = PurePath(each.model.replace("\\", "/")).name  # no path of this machine
            names = [name.strip() for name in (each.model_alias or "").split(",") if name.strip()] or [file]
            if (twice := [name for name in names if name in self._names]) != []:
                raise ValueError(f"two models are called {twice[0]!r}; give each a model_alias of its own")
            self._settings[names[0]] = each
            self._names |= dict.fromkeys(names, names[0])
        if not self._settings:
            raise ValueError("no model was given")
        self._load = load
        self._budget = budget
        self.default = next(iter(self._settings))
        self._open: dict[str, Opened] = {}
        """By alias, in the order of opening."""
        self._caches: dict[str, PromptCache] = {}
        """The cache of each model that was open once."""
        self._bytes: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def alias(self, name: str | None) -> str:
        """Return the alias of a request's model.

        A single model answers to every name, as with llama_cpp.server and llama-server. Raises Refusal for a
        name that none of several models has, as OpenAI, vLLM and llama-server's router.
        """
        if not name or (len(self._settings) == 1 and name not in self):
            return self.default
        if name not in self:
            near = difflib.get_close_matches(name[:MOST_LETTERS], self._names, 1)
            hint = f"did you mean {near[0]!r}?" if near else "/v1/models lists them"
            raise Refusal(404, f"there is no such model; {hint}", code="model_not_found", param="model")
        return self._names[name]

    def names(self, alias: str) -> list[str]:
        """Return the further names of a model."""
        return [name for name, of in self._names.items() if of == alias != name]

    @property
    def llm(self) -> Llama | None:
        """The open model that was opened last; None: none is open."""
        return next((each.llm for each in reversed(self.opened.values())), None)

    @property
    def opened(self) -> dict[str, Opened]:
        """The open models by alias; a copy, for any thread."""
        return self._open.copy()

    @property
    def caches(self) -> dict[str, PromptCache]:
        """The cache of each model that was open once, by alias; a copy, for any thread."""
        return self._caches.copy()

    def place(self, alias: str, tier: str) -> object:
        """Return the folder or the remote store of a model's cache; models that share it return the same."""
        settings = self._settings[alias]
        return (settings.disk_dir or settings.cache) if tier == "disk" else settings.remote

    def in_the_way(self, alias: str, others: Sequence[str]) -> list[str] | None:
        """Return the models to close before that one opens, the first ones of `others` if possible.

        None if closing all of them is not enough. A model larger than the budget is open alone.
        """
        if not self._open.keys() - {alias}:
            return []
        if self._budget is None and any(self._settings[each].n_gpu_layers for each in (alias, *self._open)):
            left, most = len(self._open.keys() - {alias}), 0  # by number: the memory of devices is unknown
            sizes = dict.fromkeys(others, 1)
        else:
            most = int(SHARE * physical_bytes()) if self._budget is None else self._budget
            sizes = {each: self._size(each) for each in others}
            most -= self._size(alias)
            left = sum(self._size(each) for each in self._open if each != alias)
        closing = list[str]()
        for each in others:
            if left <= most:
                return closing
            closing.append(each)
            left -= sizes[each]
        return closing if left <= max(0, most) else None

    def _size(self, alias: str) -> int:
        if alias not in self._bytes:
            self._bytes[alias] = max(1, footprint(self._settings[alias]))
        return self._bytes[alias]

    def open(self, alias: str) -> Llama:
        """Return the open model of that alias, with its earlier cache.

        Raises DeviceError while its RPC server does not answer.
        """
        if (there := self._open.get(alias)) is not None:
            return there.llm
        logger.info("opening %s", alias)
        kept, settings = self._caches.get(alias), self._settings[alias]
        llm = self._load(settings) if kept is None else self._load(settings, kept)
        self._open[alias] = Opened(llm, None)
        try:
            if llm.prompt_cache is not None:
                self._caches[alias] = llm.prompt_cache
                self._share_ram()
            self._open[alias] = Opened(llm, published(llm, settings))
        except BaseException:
            self.close(alias)  # later requests must not use it without its KV events
            raise
        return llm

    def close(self, *aliases: str) -> None:
        """Close these models, or all; pending writes to disk finish."""
        for alias in aliases or tuple(self._open):
            llm, events = self._open[alias]
            logger.info("closing %s", alias)
            try:
                if events is not None:
                    events.close()
                llm.close()
            finally:
                del self._open[alias]

    def _share_ram(self) -> None:
        """Divide the default RAM budget among the caches without their own."""
        sharing = [cache for alias, cache in self._caches.items() if not own_ram(self._settings[alias])]
        if len(sharing) > 1:
            for cache in sharing:
                cache.ram_bytes = default_ram_bytes() // len(sharing)


def own_ram(settings: ModelSettings) -> bool:
    """Return True if the settings of a model have a RAM budget."""
    return settings.ram_bytes is not None or bool(settings.cache and settings.cache_type == "ram")


def published(llm: Llama, settings: ModelSettings) -> EventPublisher | None:
    """Publish the KV events of a model if its settings say so; None otherwise.

    An address in use costs only a warning: without events, a router routes less well.
    """
    if settings.kv_events is None:
        return None
    from llamahybrid.events import EventPublisher, zmq

    try:
        return EventPublisher(
            llm,
            settings.kv_events,
            topic=settings.kv_events_topic,
            block_size=settings.kv_block_size,
        )
    except zmq.ZMQError as error:
        logger.warning("KV events are not published at %s: %s", settings.kv_events, error)
        return None


def footprint(settings: ModelSettings) -> int:
    """Return the bytes of files, of the KV of `n_ctx` tokens for each slot, and of a context for embeddings.

    0 without files.
    """
    files = [*shards(settings.model), settings.lora_path, settings.clip_model_path]
    weights = sum(Path(file).stat().st_size for file in files if file is not None and Path(file).exists())
    if settings.vocab_only or not Path(settings.model).exists():
        return weights
    try:
        context = _context(settings)
    except (OSError, KeyError, EngineError, ValueError) as error:
        logger.info("the size of %s's context is not known: %s", settings.model_alias, error)
        context = 0.0
    return int(BESIDE * (weights + context))


def _context(settings: ModelSettings) -> float:
    """Return the bytes of KV, and of a context for embeddings, which computes logits of every token, too."""
    with Gguf(Path(settings.model)) as gguf:
        architecture = str(gguf.read("general.architecture")["general.architecture"])
        told: Mapping[str, Any] = gguf.read(f"{architecture}.")
        rows = gguf.length("tokenizer.ggml.tokens") if settings.embedding else 0

    def number(name: str, otherwise: Any = 0) -> Any:
        return told.get(f"{architecture}.{name}", otherwise)

    layers, heads = int(number("block_count")), number("attention.head_count", 1)
    keyed = number("attention.head_count_kv", heads)
    kv_heads = float(np.sum(keyed)) if np.ndim(keyed) else float(keyed) * layers
    width = number("embedding_length") / max(1, int(np.max(heads)))
    key, value = number("attention.key_length", width), number("attention.value_length", width)
    of_key, of_value = (
        CACHE_TYPES[1 if kind is None else kind][1] for kind in (settings.type_k, settings.type_v)
    )
    per_token = kv_heads * (key * of_key + value * of_value)
    slots = settings.n_parallel or DEFAULT_SLOTS
    outputs = 2 * FLOAT_BYTES * rows * min(settings.n_batch, settings.n_ctx or settings.n_batch)
    return float(per_token * slots * (settings.n_ctx or number("context_length")) + outputs)
