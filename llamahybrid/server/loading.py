"""From a model's settings to an open `Llama`, by upstream's own loader."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeAlias

import llama_cpp
import llama_cpp.server.model as upstream
from llama_cpp.llama_chat_format import (
    LlamaChatCompletionHandlerNotFoundException,
    get_chat_completion_handler,
)

from llamahybrid.errors import ContextOverflow, LlamaHybridError
from llamahybrid.llama import Llama
from llamahybrid.memory.vectors import embeds_only
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.cache import DEFAULT_REMOTE_BYTES
from llamahybrid.server.settings import DEFAULT_SLOTS, ModelSettings

logger = logging.getLogger("llamahybrid.server")

max_prompt: ContextVar[int | None] = ContextVar("llamahybrid.max_prompt", default=None)
"""Prompts of more tokens are refused in this context."""


prompting: ContextVar[bool] = ContextVar("llamahybrid.prompting", default=False)
"""What is tokenized in this context is a prompt."""

LONG_TOKENS = 8
"""Bytes a token: a longer prompt may well be too long for the context, and is looked at piece by piece."""

SPARE_TOKENS = 16
"""By which a text that is cut off may have more tokens than as part of the whole."""

Observer: TypeAlias = Callable[[Sequence[int]], None]

observed: ContextVar[Observer | None] = ContextVar("llamahybrid.observed", default=None)
"""Told the ids of each prompt in this context."""


class PromptTooLong(LlamaHybridError, ValueError):
    """The prompt has more tokens than the operator allows."""


class PromptEmpty(LlamaHybridError, ValueError):
    """The prompt has no tokens."""


class TokenText(str):
    """A text that is given by its token ids, for code that encodes texts and has them tokenized."""

    def __new__(cls, ids: Sequence[int]) -> TokenText:
        """Of these ids, as they are: no BOS comes before them."""
        made = super().__new__(cls)
        made.ids = ids
        return made

    ids: Sequence[int]

    def encode(self, *_: Any, **__: Any) -> bytes:
        """See `ServedLlama.tokenize`."""
        return _TokenBytes(array("q", self.ids).tobytes())


class _TokenBytes(bytes):
    """Token ids, 8 bytes each."""


class ServedLlama(Llama):
    """A `Llama` that refuses prompts that are longer than the operator allows, before anything is decoded."""

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        """See upstream's; of a `TokenText`, its ids.

        Raises ContextOverflow for a prompt whose beginning alone fills the context.
        The time grows with the square of control tokens, in one native call that nothing ends.
        """
        if isinstance(text, _TokenBytes):
            return array("q", bytes(text)).tolist()
        n_ctx, end = self.n_ctx(), LONG_TOKENS * self.n_ctx()
        while prompting.get() and end < len(text):
            while end and text[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            if len(super().tokenize(text[:end], *args, **kwargs)) > n_ctx + SPARE_TOKENS:
                raise ContextOverflow(
                    f"This model's maximum context length is {n_ctx} tokens, but the prompt has more than "
                    f"{n_ctx + SPARE_TOKENS}. Please reduce the length of the messages."
                )
            end *= 2
        tokens: list[int] = super().tokenize(text, *args, **kwargs)
        return tokens

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """See `Llama.generate`. Raises PromptTooLong, PromptEmpty."""
        if not len(tokens):
            raise PromptEmpty("the prompt is empty: there is nothing to go on from")
        limit = max_prompt.get()
        if limit is not None and len(tokens) > limit:
            raise PromptTooLong(f"the prompt has {len(tokens):,} tokens; this server takes {limit:,}")
        if (observe := observed.get()) is not None:
            observe(tokens)
        return super().generate(tokens, *args, **kwargs)


class _Namespace:
    """llama_cpp, for upstream's loader, with another `Llama`."""

    def __init__(self, opened: type) -> None:
        self.Llama = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(llama_cpp, name)


def load(settings: ModelSettings, cache: PromptCache | None = None) -> Llama:
    """Open a model. Raises ValueError where its settings do not go together, or a file cannot be read.

    `cache`: where its conversations are, if not in a new one. Raises DeviceError where an RPC server does not
    answer.
    """
    slots = settings.n_parallel
    if slots is None:
        slots = DEFAULT_SLOTS if chats(settings) and settings.draft_model is None else 1
    try:
        return _load(settings, slots, cache)
    except (AssertionError, RuntimeError, TypeError, KeyError) as error:  # upstream's, of its options
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

    unsaid = {"flash_attn"} - settings.model_fields_set  # which several slots then have on a GPU

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
        # It writes a text and does not decode by itself: as a chat format, it needs no model to itself.
        llm._chat_handlers[llm.chat_format] = llm.chat_handler
        llm.chat_handler = None
    return llm


def chats(settings: ModelSettings) -> bool:
    """The model is not opened for its vocabulary, or embeddings, alone."""
    return not settings.vocab_only and not (settings.embedding and embeds_only(settings.model, {}))


def known_format(llm: Llama) -> bool:
    """The chat format of a model is one of its own, or of llama_cpp's."""
    if llm.chat_format in llm._chat_handlers:
        return True
    try:
        get_chat_completion_handler(llm.chat_format)
    except LlamaChatCompletionHandlerNotFoundException:
        return False
    return True


def cache_of(settings: ModelSettings) -> PromptCache:
    """Where a model's conversations are kept."""
    ram, folder, disk = settings.ram_bytes, settings.disk_dir, settings.disk_bytes
    if settings.cache and settings.cache_type == "ram":
        ram = settings.cache_size if ram is None else ram
    elif settings.cache:
        disk = settings.cache_size if disk is None else disk
        folder = "./.cache/llama_cache" if folder is None else folder  # upstream's (llama_cache.py)
    remote = settings.remote.get_secret_value() if settings.remote is not None else None
    there = DEFAULT_REMOTE_BYTES if settings.remote_bytes is None else settings.remote_bytes
    return PromptCache(ram, folder, disk, settings.disk_write_bytes, remote=remote, remote_bytes=there)
