"""Targets by their names on the command line."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llamahybrid.errors import TargetError
from llamahybrid.harness.targets.base import Target
from llamahybrid.harness.targets.http import UrlTarget
from llamahybrid.harness.targets.local import LocalTarget
from llamahybrid.harness.targets.server import ServerTarget

NAMES = ("stock", "stock+ram", "stock+disk", "ours")
KEY = "LLAMAHYBRID_TARGET_KEY"
"""Environment variable with the API key of a URL."""


_LABEL = re.compile(r"([^:/=@]+)=(.+)", re.DOTALL)
_CLASS = re.compile(r"class:(.+):(\w+)(?:@(.+))?", re.DOTALL)


def targets(
    names: Sequence[str], lib: Path | None = None, server_options: Sequence[str] = ()
) -> list[Target]:
    """Return the `target` of each name. Raises as `target`, and TargetError for two targets of one name."""
    found = [target(name, lib, server_options) for name in names]
    twice = [name for name, count in Counter(each.name for each in found).items() if count > 1]
    if twice:
        raise TargetError(f"several targets are called {', '.join(twice)}; LABEL=TARGET gives one a name")
    return found


def target(name: str, lib: Path | None = None, server_options: Sequence[str] = ()) -> Target:
    """Return the target of `NAMES`, `class:FILE:NAME`, `server:PATH`, or a URL, called LABEL after `LABEL=`.

    Python targets run on the libllama in `lib`, or in a folder or file after an `@`:
    ``patched=stock@build/bin``. Raises TargetError for another name, EngineError if there is no libllama.
    """
    labelled = _LABEL.fullmatch(name)
    label, what = labelled.groups() if labelled else (name, name)
    if what.startswith("server:"):
        return ServerTarget(label, Path(what.removeprefix("server:")), server_options)
    if what.startswith(("http://", "https://")):
        return UrlTarget(label, what, os.environ.get(KEY))
    kind, _, own = what.partition("@")
    if kind in NAMES:
        return LocalTarget(label, kind, Path(own) if own else lib)
    if what.startswith("class:"):
        # a path may have an @ of its own
        found = _CLASS.fullmatch(what)
        if not found:
            raise TargetError(
                f"{name}: give class:FILE.py:NAME, a class that takes what llama_cpp.Llama takes"
            )
        if not Path(found[1]).is_file():
            raise TargetError(f"{name}: there is no file {found[1]}")
        kind = f"class:{Path(found[1]).resolve()}:{found[2]}"
        return LocalTarget(label, kind, Path(found[3]) if found[3] else lib)
    known = ", ".join(NAMES)
    raise TargetError(
        f"no target {name!r}; there are {known}, class:FILE.py:NAME, server:PATH and http://..., "
        "and LABEL= may stand before each"
    )
