"""Choose which built engine replaces llama-cpp-python's own libraries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from llamahybrid.engine import bindings, installed, libraries, series
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.recipe import CMAKE_ARGS, Recipe

logger = logging.getLogger("llamahybrid")


@dataclass(frozen=True)
class InstalledBindings:
    """The installed llama-cpp-python."""

    version: str | None
    """None: not installed."""
    backends: frozenset[str] | None
    """Backends of its own libraries; None: unknown."""

    @classmethod
    def here(cls) -> InstalledBindings:
        """The package that `import llama_cpp` finds."""
        return cls(bindings.version(), libraries.backends(bindings.stock()))


def mismatch(engine: Engine, site: InstalledBindings) -> str:
    """Why an engine does not replace stock automatically; empty: it does.

    An engine without a backend of the installed wheel is never used: a CUDA wheel stays until a CUDA engine
    is built.
    """
    return _unfit(engine, site) or engine.unsafe() or _lacks(engine, site)


def compatible_engines() -> Iterator[Engine]:
    """The engines that replace stock, latest first; a damaged or unsafe one is logged."""
    engines = installed.engines()
    if not engines:  # usual; looking at the installed package takes time
        return
    site = InstalledBindings.here()
    for engine in engines:
        if _unfit(engine, site):
            continue
        if problem := engine.unsafe():
            logger.warning("a patched engine is not loaded: %s", problem)
        elif not _lacks(engine, site):
            yield engine


def build_warning(site: InstalledBindings) -> str:
    """Why an engine that `engine build` makes now would not be used automatically; empty: it would be."""
    if bindings.release(site.version) not in series.releases():
        built = series.release(site.version)
        return (
            f"there are patches for llama-cpp-python {', '.join(series.releases())}, installed is "
            f"{site.version or 'none'}: it is made for {built} and taken beside {built} alone"
        )
    options = " ".join([CMAKE_ARGS, *(value for _, value in Recipe.options_here())])
    usual = {"cpu", "metal", "blas"} if sys.platform == "darwin" else {"cpu"}
    named = {name for name in site.backends or () if f"GGML_{name.upper()}" in options}
    if missing := (site.backends or frozenset()) - named - usual:
        names = ", ".join(sorted(missing))
        return (
            f"the installed llama-cpp-python has {names}, which no option asks for: "
            f"{libraries.how_to_build(site.backends or ())} makes an engine that takes its place"
        )
    return ""


def _unfit(engine: Engine, site: InstalledBindings) -> str:
    if engine.source:
        return f"built from {engine.source}: choose it with LLAMAHYBRID_ENGINE={engine.libraries}"
    if engine.version != bindings.release(site.version):
        return f"made for llama-cpp-python {engine.version}, installed is {site.version or 'none'}"
    known = (series.patches(engine.version, chosen) for chosen in (series.REUSE, series.HARDENING))
    if dict(engine.patches) not in known:
        return "the patches have changed since"
    return "" if engine.recipe.runs_here() else "built for another machine"


def _lacks(engine: Engine, site: InstalledBindings) -> str:
    own = f"LLAMAHYBRID_ENGINE={engine.libraries} takes it all the same"
    if site.backends is None:
        return f"which backends (CUDA, ...) the installed llama-cpp-python has cannot be told; {own}"
    if not (missing := site.backends - (libraries.backends(engine.libraries) or frozenset())):
        return ""
    how = libraries.how_to_build(site.backends)
    lacks = f"the installed llama-cpp-python has {', '.join(sorted(missing))} and this has not"
    return f"{lacks}: {how} makes one that has; {own}"
