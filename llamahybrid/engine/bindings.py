"""The installed llama-cpp-python: its version, its own libraries, and the loaded ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def version(package: str = "llama-cpp-python") -> str | None:
    """The version of an installed package, without importing it; None: not installed.

    A llama_cpp that precedes the installed one on the path (a checkout, say) is the one that is imported, so
    its own `__version__` counts.
    """
    from importlib import metadata  # slow to import, and rarely needed

    try:
        known = metadata.version(package)
    except metadata.PackageNotFoundError:
        known = None
    importable = _importable_version() if package == "llama-cpp-python" else None
    return importable if importable and importable != release(known) else known


def release(version: str | None) -> str:
    """A version without its local label (0.3.36+cu124), which names the build variant; empty for None."""
    return (version or "").partition("+")[0]


def stock() -> Path | None:
    """The folder of llama-cpp-python's own libraries; None: not installed."""
    from importlib.util import find_spec

    try:
        spec = find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))).resolve() / "lib" if places else None


def loaded_from() -> Path | None:
    """The folder that libllama was loaded from in this process; None: not loaded."""
    module = sys.modules.get("llama_cpp.llama_cpp")
    handle = getattr(module, "_lib", None)
    return None if handle is None else Path(handle._name).parent.resolve()


def _importable_version() -> str | None:
    """The `__version__` of the llama_cpp that would be imported."""
    libraries = stock()
    try:
        text = (libraries.parent / "__init__.py").read_text(errors="replace") if libraries else ""
    except OSError:
        return None
    found = re.search(r"""^__version__ = ["']([^"']+)["']""", text, re.MULTILINE)
    return found and found.group(1)
