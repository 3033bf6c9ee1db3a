"""The built engines: each is a folder of libraries with a manifest, in the user's cache folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llamahybrid.engine import sdist, series
from llamahybrid.engine.recipe import Recipe
from llamahybrid.engine.trust import untrusted

_PREFIX = "" if sys.platform == "win32" else "lib"
SUFFIXES = {"win32": (".dll",), "darwin": (".dylib", ".so")}.get(sys.platform, (".so",))
_QUICK = 32 << 20
"""Libraries up to this many bytes are hashed at each load (20 ms); for larger ones (CUDA's have hundreds of
MiB) only the size is compared."""


@dataclass(frozen=True)
class Engine:
    """A folder of libraries and its origin."""

    folder: Path
    version: str
    """Of llama-cpp-python; only this version's bindings may load it."""
    recipe: Recipe
    patches: Mapping[str, str]
    """File name to sha256, in order; empty for a checkout."""
    source: str
    """The checkout it was built from; empty: the pinned sdist with `patches`."""
    built: str
    """UTC, ISO 8601."""
    files: Mapping[str, tuple[int, str]]
    """Name of each library to its bytes and sha256."""

    @property
    def libraries(self) -> Path:
        """The folder for `LLAMA_CPP_LIB_PATH`."""
        return self.folder / "lib"

    @property
    def numbers(self) -> frozenset[str]:
        """Numbers of its patches."""
        return frozenset(map(series.number, self.patches))

    def damage(self, thorough: bool = False) -> str:
        """Describe damage to its files; empty: none. Loading a truncated library would end the process.

        Args:
            thorough: hash large files, too.
        """
        for name, (size, digest) in self.files.items():
            path = self.libraries / name
            try:
                there = path.stat().st_size
                if there != size:
                    return f"{path} is damaged: {there} bytes, not {size}"
                if (thorough or size <= _QUICK) and sdist.sha256(path) != digest:
                    return f"{path} is damaged: its content has changed"
            except OSError as error:
                return f"{path} cannot be read: {error.strerror}"
        return ""

    def unsafe(self) -> str:
        """Return the reason why its libraries must not be loaded; empty: they may be."""
        if problem := untrusted(self.folder):
            return f"somebody else could have written it: {problem}"
        damage = self.damage()
        return damage and f"{damage}: run `llamahybrid engine build` again"

    def write(self) -> None:
        """Write the manifest into the folder."""
        content = asdict(self)
        del content["folder"]
        (self.folder / "manifest.json").write_text(json.dumps(content, indent=2) + "\n")


def home() -> Path:
    """The folder of all engines, each in a folder named by its key."""
    return sdist.cache_dir() / "engines"


def contents(libraries: Path) -> dict[str, tuple[int, str]]:
    """`Engine.files` for a folder of libraries."""
    return {
        path.name: (path.stat().st_size, sdist.sha256(path))
        for path in sorted(libraries.iterdir())
        if path.is_file() and not path.is_symlink()
    }


def read(folder: Path) -> Engine:
    """Read an engine's manifest.

    Raises:
        ValueError: there is no manifest, or an unknown format.
    """
    try:
        content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        recipe = {each.name: content["recipe"][each.name] for each in fields(Recipe)}
        for pairs in ("options", "compilers"):
            recipe[pairs] = tuple((name, value) for name, value in recipe[pairs])
        texts = {name: content[name] for name in ("version", "source", "built")}
        if odd := [name for name, text in texts.items() if not isinstance(text, str)]:
            raise TypeError(f"{', '.join(odd)}: no text")
        return Engine(
            folder=folder,
            recipe=Recipe(**recipe),
            patches=dict(content["patches"]),
            files={name: (size, digest) for name, (size, digest) in content["files"].items()},
            **texts,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} has no manifest that can be read ({error})") from error


def owner(libraries: Path) -> Engine | None:
    """The engine that a folder of libraries belongs to; None: another origin."""
    try:
        engine = read(libraries.parent)
    except ValueError:
        return None
    return engine if engine.libraries.resolve() == libraries.resolve() else None


def engines() -> list[Engine]:
    """All built engines, latest first; folders without a readable manifest are skipped."""
    found = [engine for engine in _read_all() if isinstance(engine, Engine)]
    return sorted(found, key=lambda engine: engine.built, reverse=True)


def unreadable() -> list[str]:
    """The errors for folders without a readable manifest."""
    return [str(error) for error in _read_all() if isinstance(error, ValueError)]


def library(folder: Path, name: str) -> Path | None:
    """The file that llama_cpp would load from a folder, e.g. for ``llama`` or ``mtmd``."""
    names = (f"{prefix}{name}{suffix}" for suffix in SUFFIXES for prefix in dict.fromkeys((_PREFIX, "lib")))
    return next((folder / file for file in names if (folder / file).is_file()), None)


def _read_all() -> Iterator[Engine | ValueError]:
    try:
        folders = sorted(path for path in home().iterdir() if path.is_dir() and not path.name.startswith("."))
    except (OSError, RuntimeError):  # absent, unreadable, or no home folder
        return
    for folder in folders:
        try:
            yield read(folder)
        except ValueError as error:
            yield error
