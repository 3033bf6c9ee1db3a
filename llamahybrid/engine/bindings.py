"""The llama-cpp-python that is installed: its version, its own libraries, and those that are loaded."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def version(package: str = "llama-cpp-python") -> str | None:
    """The installed package's, read without importing it; None: there is none.

    A llama_cpp that lies before the installed one on the path (a checkout, say) is the one that is imported,
    so what that one says of itself counts.
    """
    from importlib import metadata  # slow to import, and seldom needed

    try:
        known = metadata.version(package)
    except metadata.PackageNotFoundError:
        known = None
    said = _said() if package == "llama-cpp-python" else None
    return said if said and said != (known or "").partition("+")[0] else known


def _said() -> str | None:
    """The `__version__` in the llama_cpp that would be imported."""
    libraries = stock()
    try:
        text = (libraries.parent / "__init__.py").read_text(errors="replace") if libraries else ""
    except OSError:
        return None
    found = re.search(r"""^__version__ = ["']([^"']+)["']""", text, re.MULTILINE)
    return found and found.group(1)


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
