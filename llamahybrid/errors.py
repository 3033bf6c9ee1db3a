"""The errors that llamahybrid raises; each message names a remedy."""

from __future__ import annotations

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""`errno` of a full disk, or of a quota that is used up."""


class LlamaHybridError(Exception):
    """Base of all errors raised by llamahybrid."""


class Busy(LlamaHybridError):
    """No slot is free and the caller asked not to wait."""


class RequestSuperseded(LlamaHybridError):
    """A request lost its slot and cannot continue (an image is gone, or tokens were sent in); ask again."""


class ModelClosed(LlamaHybridError, RuntimeError):
    """`close()` was called on this `Llama`; open the model again."""


class RequestCancelled(LlamaHybridError):
    """`cancel()` ended this request; decoded tokens are kept."""


class DecodeError(LlamaHybridError, RuntimeError):
    """`llama_decode` failed; the live sequence is sound. `code` is the native result."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceError(LlamaHybridError, RuntimeError):
    """A device for the model is not available: llama.cpp lacks it, or its server does not answer."""


class DeviceLost(DecodeError, DeviceError):
    """An RPC server of the model is lost: close this `Llama` and open it again.

    RAM and disk stay: a `Llama` with the same `prompt_cache` continues from there.
    """

    def __init__(self, message: str) -> None:
        super().__init__(-3, message)  # llama_decode's result where computing fails


class SnapshotError(LlamaHybridError, ValueError, RuntimeError):
    """State bytes are damaged, truncated, or of another model, engine or context."""

    segment: object = None
    """The damaged attention segment, if the snapshot itself is sound."""


class RecordError(LlamaHybridError, ValueError):
    """A record of the disk cache is damaged, of another format, or gone."""


class RecordGone(RecordError):
    """A record of the disk cache is gone, maybe evicted by another process."""


class ContextOverflow(LlamaHybridError, ValueError, RuntimeError):
    """The tokens do not fit into the context window."""


class UnknownArchitecture(LlamaHybridError, ValueError):
    """`tiny` cannot make a model of this architecture; the message has the library's reason."""


class EngineError(LlamaHybridError, RuntimeError):
    """The sdist, the build or the installed engine is not as expected."""


class FolderRefused(LlamaHybridError, OSError):
    """A folder is unfit for a disk cache: others own it or may write to it, or another program uses it."""


class ConfigurationError(LlamaHybridError, ValueError):
    """A setting of `configure` or the environment is invalid; the message has the valid forms."""


class ReportError(LlamaHybridError, ValueError):
    """A report or trace of the harness is damaged or of another format."""


class TargetError(LlamaHybridError, RuntimeError):
    """A target of the harness cannot start, has died, or gives invalid answers."""
