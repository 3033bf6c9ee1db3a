"""Open a `Llama` by a model's settings, with upstream's own loader."""

from __future__ import annotations

import logging
from types import FunctionType
from typing import Any

import llama_cpp
import llama_cpp.server.model as upstream
from llama_cpp.llama_chat_format import (
    LlamaChatCompletionHandlerNotFoundException,
    get_chat_completion_handler,
)

from llamahybrid.errors import LlamaHybridError
from llamahybrid.llama import Llama
from llamahybrid.memory.vectors import embeds_only
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.cache import DEFAULT_REMOTE_BYTES
from llamahybrid.server.prompts import ServedLlama
from llamahybrid.server.settings import DEFAULT_SLOTS, ModelSettings

logger = logging.getLogger("llamahybrid.server")


class _Namespace:
    """The module llama_cpp with another `Llama`, for upstream's loader."""

    def __init__(self, opened: type) -> None:
        self.Llama = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(llama_cpp, name)


def load(settings: ModelSettings, cache: PromptCache | None = None) -> Llama:
    """Open a model, with an earlier prompt cache if one is given.

    Raises ValueError for contradictory settings and unreadable files, DeviceError for an RPC server that does
    not answer.
    """
    slots = settings.n_parallel
    if slots is None:
        slots = DEFAULT_SLOTS if chats(settings) and settings.draft_model is None else 1
    try:
        return _load(settings, slots, cache)
    except (AssertionError, RuntimeError, TypeError, KeyError) as error:  # upstream's errors of options
        if isinstance(error, LlamaHybridError):
            raise
        raise ValueError(str(error) or type(error).__name__) from error
    except ValueError as error:
        if settings.n_parallel is not None or slots == 1 or "n_parallel" not in str(error):
            raise
        logger.warning("%s; one slot", error)
        return _load(settings, 1, cache)


def _load(settings: ModelSettings, slots: int, cache: PromptCache | None) -> Llama:
    more: dict[str, Any] = {"n_parallel": slots, "paging": settings.paging, "logits_all": False}
    if chats(settings):
        more["prompt_cache"] = cache or cache_of(settings)

    unsaid = {"flash_attn"} - settings.model_fields_set  # the default then depends on slots and GPU

    class Configured(ServedLlama):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            said = {name: value for name, value in kwargs.items() if name not in unsaid}
            super().__init__(*args, **{**said, **more})

    loader = upstream.LlamaProxy.load_llama_from_model_settings
    ours = FunctionType(loader.__code__, {**loader.__globals__, "llama_cpp": _Namespace(Configured)})
    llm: Llama = ours(settings.model_copy(update={"cache": False}))
    if llm.chat_handler is None and not known_format(llm):
        llm.close()
        raise ValueError(f"chat_format: there is none called {llm.chat_format!r}")
    llm.requests.logprobs_on_request = settings.logits_all
    if llm.chat_handler is not None and settings.clip_model_path is None:
        # This handler only writes prompts: as a chat format it allows parallel requests.
        llm._chat_handlers[llm.chat_format] = llm.chat_handler
        llm.chat_handler = None
    return llm


def chats(settings: ModelSettings) -> bool:
    """Return False for a model that serves its vocabulary, or embeddings, only."""
    return not settings.vocab_only and not (settings.embedding and embeds_only(settings.model, {}))


def known_format(llm: Llama) -> bool:
    """Return True if the chat format of a model is its own, or one of llama_cpp's."""
    if llm.chat_format in llm._chat_handlers:
        return True
    try:
        get_chat_completion_handler(llm.chat_format)
    except LlamaChatCompletionHandlerNotFoundException:
        return False
    return True


def cache_of(settings: ModelSettings) -> PromptCache:
    """Return a prompt cache by a model's settings."""
    ram, folder, disk = settings.ram_bytes, settings.disk_dir, settings.disk_bytes
    if settings.cache and settings.cache_type == "ram":
        ram = settings.cache_size if ram is None else ram
    elif settings.cache:
        disk = settings.cache_size if disk is None else disk
        folder = "./.cache/llama_cache" if folder is None else folder  # upstream's (llama_cache.py)
    remote = settings.remote.get_secret_value() if settings.remote is not None else None
    there = DEFAULT_REMOTE_BYTES if settings.remote_bytes is None else settings.remote_bytes
    return PromptCache(ram, folder, disk, settings.disk_write_bytes, remote=remote, remote_bytes=there)
