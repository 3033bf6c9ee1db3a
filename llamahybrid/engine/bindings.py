"""The llama-cpp-python that is installed: its version, its own libraries, and those that are loaded."""

from __future__ import annotations

import sys
from pathlib import Path


def version(package: str = "llama-cpp-python") -> str | None:
    """The installed package's, read without importing it; None: there is none."""
    from importlib import metadata  # slow to import, and seldom needed

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def stock() -> Path | None:
    """The folder of the libraries that llama-cpp-python brought along; None when it is not installed."""
    from importlib.util import find_spec

    try:
        spec = find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))).resolve() / "lib" if places else None


def loaded_from() -> Path | None:
    """The folder that the llama_cpp of this process loaded libllama from; None: not loaded."""
    module = sys.modules.get("llama_cpp.llama_cpp")
    handle = getattr(module, "_lib", None)
    return None if handle is None else Path(handle._name).parent.resolve()
