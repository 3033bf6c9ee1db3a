"""Which of the engines that were built takes the place of llama-cpp-python's own libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from llamahybrid.engine import backends, bindings, installed, series
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.recipe import CMAKE_ARGS, Recipe
from llamahybrid.engine.trust import untrusted


@dataclass(frozen=True)
class Site:
    """The llama-cpp-python that is installed."""

    version: str | None
    """None: there is none."""
    backends: frozenset[str] | None
    """What its own libraries have; None: cannot be told."""

    @classmethod
    def here(cls) -> Site:
        """The one that `import llama_cpp` finds."""
        return cls(bindings.version(), backends.of(bindings.stock()))


def mismatch(engine: Engine, site: Site) -> str:
    """Why an engine does not replace stock by itself; empty: it does.

    It never takes a backend away: whoever installed a CUDA wheel keeps it until there is a CUDA engine.
    """
    return _unfit(engine, site) or _unsafe(engine) or _lacks(engine, site)


def fitting(site: Site | None = None, refused: Callable[[str], None] = lambda reason: None) -> list[Engine]:
    """The engines that may replace stock, best first.

    One that was built with the very options of the environment, then more backends, then the latest.

    Args:
        site: the llama-cpp-python that is installed; None: find out.
        refused: told of each that would fit, were it not damaged or somebody else's.
    """
    engines = installed.engines()
    if not engines:  # the usual case, and looking further is not free
        return []
    site = site or Site.here()
    matching = []
    for engine in engines:
        if _unfit(engine, site):
            continue
        if reason := _unsafe(engine):
            refused(reason)
        elif not _lacks(engine, site):
            matching.append(engine)
    return sorted(matching, key=_rank, reverse=True)  # stable: the latest stays first among equals


def forecast(site: Site) -> str:
    """Why what `engine build` would build now is not going to be taken; empty: nothing speaks against it."""
    if _release(site.version) not in series.releases():
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
            f"{backends.how_to_build(site.backends or ())} makes an engine that takes its place"
        )
    return ""


def _release(version: str | None) -> str | None:
    """A version without its local label (0.3.36+cu124), which says how a release was built."""
    return version and version.partition("+")[0]


def _unfit(engine: Engine, site: Site) -> str:
    if engine.source:
        return f"built from {engine.source}: choose it with LLAMAHYBRID_ENGINE={engine.libraries}"
    if engine.version != _release(site.version):
        return f"made for llama-cpp-python {engine.version}, installed is {site.version or 'none'}"
    known = (series.patches(engine.version, chosen) for chosen in (series.REUSE, series.HARDENING))
    if dict(engine.patches) not in known:
        return "the patches have changed since"
    if not engine.recipe.runs_here():
        return "built for another machine"
    return ""


def _unsafe(engine: Engine) -> str:
    if problem := untrusted(engine.folder):
        return f"somebody else could have written it: {problem}"
    if damage := engine.damage():
        return f"{damage}: run `llamahybrid engine build` again"
    return ""


def _lacks(engine: Engine, site: Site) -> str:
    own = f"LLAMAHYBRID_ENGINE={engine.libraries} takes it all the same"
    if site.backends is None:
        return f"which backends (CUDA, ...) the installed llama-cpp-python has cannot be told; {own}"
    has = backends.of(engine.libraries) or frozenset()
    if missing := site.backends - has:
        names = ", ".join(sorted(missing))
        return (
            f"the installed llama-cpp-python has {names} and this has not: "
            f"{backends.how_to_build(site.backends)} makes one that has; {own}"
        )
    return ""


def _rank(engine: Engine) -> tuple[bool, int]:
    wanted = Recipe.options_here()
    return bool(wanted) and engine.recipe.options == wanted, len(backends.of(engine.libraries) or ())
