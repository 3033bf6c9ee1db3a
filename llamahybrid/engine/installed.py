"""The engines that were built: each is a folder of libraries with a manifest, in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamahybrid.engine import sdist, series
from llamahybrid.engine.build import Recipe

_PREFIX = "" if sys.platform == "win32" else "lib"
_SUFFIXES = {"win32": (".dll",), "darwin": (".dylib", ".so")}.get(sys.platform, (".so",))


@dataclass(frozen=True)
class Engine:
    """A folder of libraries and how they came about."""

    folder: Path
    version: str
    """Of llama-cpp-python; only this version's bindings may load it."""
    recipe: Recipe
    patches: Mapping[str, str]
    """File name to sha256, in order; empty when `source` is not."""
    source: str
    """The checkout it was built from, as it was; empty: the pinned sdist with `patches`."""
    symbols: tuple[str, ...]
    """Those of `native.OPTIONAL` that its libllama has."""
    built: str
    """UTC, ISO 8601."""
    seconds: float
    """How long the build took."""

    @property
    def libraries(self) -> Path:
        """What `LLAMA_CPP_LIB_PATH` is to name."""
        return self.folder / "lib"

    def mismatch(self, version: str | None) -> str:
        """Why it does not replace stock by itself beside llama-cpp-python `version`; empty: it does."""
        here = Recipe.here()
        if self.source:
            return f"built from {self.source}: choose it with LLAMAHYBRID_ENGINE={self.libraries}"
        if self.version != version:
            return f"made for llama-cpp-python {self.version}, installed is {version or 'none'}"
        if dict(self.patches) != series.patches():
            return "the patches have changed since"
        if (self.recipe.platform, self.recipe.cpu) != (here.platform, here.cpu):
            return "built for another machine"
        if library(self.libraries, "llama") is None:
            return "its libraries are gone"
        return ""

    def write(self) -> None:
        """Write the manifest into the folder."""
        content = asdict(self)
        del content["folder"]
        (self.folder / "manifest.json").write_text(json.dumps(content, indent=2) + "\n")


def home() -> Path:
    """The folder that holds an engine per content key."""
    return sdist.cache_dir() / "engines"


def read(folder: Path) -> Engine:
    """The engine in a folder, from its manifest.

    Raises:
        OSError, ValueError, TypeError, KeyError: there is no manifest, or it is not one of ours.
    """
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    recipe = content.pop("recipe")
    recipe["options"] = tuple((name, value) for name, value in recipe["options"])
    content["symbols"] = tuple(content["symbols"])
    return Engine(folder=folder, recipe=Recipe(**recipe), **content)


def engines() -> list[Engine]:
    """Every engine that was built here, latest first; a folder without a manifest is passed over."""
    found = []
    for manifest in home().glob("[!.]*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found.append(read(manifest.parent))
    return sorted(found, key=lambda engine: engine.built, reverse=True)


def library(folder: Path, name: str) -> Path | None:
    """The library that llama_cpp would load from a folder, e.g. for ``llama`` or ``mtmd``."""
    names = (f"{prefix}{name}{suffix}" for suffix in _SUFFIXES for prefix in dict.fromkeys((_PREFIX, "lib")))
    return next((folder / file for file in names if (folder / file).is_file()), None)
