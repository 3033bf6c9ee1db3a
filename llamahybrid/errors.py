"""Every error llamahybrid raises on purpose; each message says what to do next."""

from __future__ import annotations


class LlamaHybridError(Exception):
    """Base of all errors raised by llamahybrid."""


class Busy(LlamaHybridError):
    """Another request is running on this `Llama` and the caller asked not to wait."""


class RequestSuperseded(LlamaHybridError):
    """A newer request took this one's place, and it cannot go on; ask again.

    An image in it is gone, say, or its own stopping criterion made that request, inside a step of this one.
    """


class ModelClosed(LlamaHybridError, RuntimeError):
    """`close()` was called on this `Llama`; open the model again."""


class RequestCancelled(LlamaHybridError):
    """`cancel()` ended this request; what was decoded is kept, so asking again decodes only the rest."""


class DecodeError(LlamaHybridError, RuntimeError):
    """`llama_decode` failed; the live sequence was left sound (`code` is the native result)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceError(LlamaHybridError, RuntimeError):
    """A device that a model is to lie on cannot be had: llama.cpp lacks it, or its server does not answer."""


class DeviceLost(DecodeError, DeviceError):
    """An RPC server with layers of the model is gone: this `Llama` can only be closed; open it again.

    What RAM and disk hold stays; a `Llama` that is given the same `prompt_cache` goes on from there.
    """

    def __init__(self, message: str) -> None:
        super().__init__(-3, message)  # llama_decode's result where computing fails


class SnapshotError(LlamaHybridError, ValueError, RuntimeError):
    """State bytes are damaged, truncated, or belong to another model, engine or context.

    Upstream's `load_state` raises RuntimeError where the library does not take them.
    """

    segment: object = None
    """The stored attention it is about, if it is not the snapshot itself."""


class RecordError(LlamaHybridError, ValueError):
    """A record of the disk cache is damaged, of another format, or gone."""


class RecordGone(RecordError):
    """A record of the disk cache is not there any more; another process may have evicted it."""


class ContextOverflow(LlamaHybridError, ValueError, RuntimeError):
    """The tokens do not fit into the context window (upstream raises either base, depending on where)."""


class UnknownArchitecture(LlamaHybridError, ValueError):
    """`tiny` cannot make a model of this architecture; the message carries the library's reason."""


class EngineError(LlamaHybridError, RuntimeError):
    """The sdist, the build or the installed engine is not what was expected."""


class FolderRefused(LlamaHybridError, OSError):
    """A folder is not fit for a disk cache: not yours alone to write to, or another program's."""


class ConfigurationError(LlamaHybridError, ValueError):
    """What `configure` or the environment says of the cache means nothing; the message says what would."""


class ReportError(LlamaHybridError, ValueError):
    """A report or trace of the harness is damaged, or of another format."""


class TargetError(LlamaHybridError, RuntimeError):
    """What the harness tests cannot be started, has died, or answers what it should not."""
