"""Prefix reuse that works for hybrid, recurrent and sliding-window models in llama-cpp-python.

Importing this package decides which engine llama_cpp will load, and is cheap: `Llama` and `PromptCache` are
imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llamahybrid.engine.activation import activate
from llamahybrid.errors import (
    Busy,
    ConfigurationError,
    ContextOverflow,
    DecodeError,
    DeviceError,
    DeviceLost,
    EngineError,
    LlamaHybridError,
    ModelClosed,
    ReportError,
    RequestCancelled,
    RequestSuperseded,
    SnapshotError,
    TargetError,
    UnknownArchitecture,
)

if TYPE_CHECKING:
    from llamahybrid.configuration import configure
    from llamahybrid.installation import install, uninstall
    from llamahybrid.llama import Llama
    from llamahybrid.prompt_cache import PromptCache
    from llamahybrid.speculation.model_draft import ModelDraft

__version__ = "0.1.0"

__all__ = [
    "Busy",
    "ConfigurationError",
    "ContextOverflow",
    "DecodeError",
    "DeviceError",
    "DeviceLost",
    "EngineError",
    "Llama",
    "LlamaHybridError",
    "ModelClosed",
    "ModelDraft",
    "PromptCache",
    "ReportError",
    "RequestCancelled",
    "RequestSuperseded",
    "SnapshotError",
    "TargetError",
    "UnknownArchitecture",
    "__version__",
    "configure",
    "install",
    "uninstall",
]

activate()

_HOMES = {
    "Llama": "llamahybrid.llama",
    "ModelDraft": "llamahybrid.speculation.model_draft",
    "PromptCache": "llamahybrid.prompt_cache",
    "configure": "llamahybrid.configuration",
    "install": "llamahybrid.installation",
    "uninstall": "llamahybrid.installation",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
