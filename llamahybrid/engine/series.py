"""The patch series, one per release of llama-cpp-python, and applying it to the llama.cpp of its sdist.

`patches/VERSION/` holds a release's patches, their order (`series`) and the sha256 of their sdist (`pin`).
The folder of a patch is its set: this package needs `reuse`; `server` changes llama-server alone; `hardening`
repairs faults of llama.cpp that this package does not meet.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from llamahybrid.engine import bindings
from llamahybrid.engine.sdist import Pin
from llamahybrid.errors import EngineError

_PACKAGE = Path(__file__).parents[1]

REUSE = ("reuse",)
SERVER = ("reuse", "server")
HARDENING = ("reuse", "hardening")


def releases() -> tuple[str, ...]:
    """The releases with patches, oldest first; empty if the package lacks the patches."""
    return tuple(sorted((path.parent.name for path in _home().glob("*/series")), key=order))


def release(installed: str | None) -> str:
    """The release whose patches fit an installed version (0.3.36+cu124, say): its own, else the newest."""
    known = releases()
    own = bindings.release(installed)
    return own if own in known or not known else known[-1]


def order(version: str) -> tuple[int, ...]:
    """The sort key of a version."""
    return tuple(map(int, re.findall(r"\d+", version)))


def folder(version: str) -> Path:
    """The folder of a release's patches: inside an installed package, beside the package in a checkout.

    Raises:
        EngineError: there are none.
    """
    known = releases()
    if version in known:
        return _home() / version
    if known:
        raise EngineError(f"no patches for llama-cpp-python {version}; there are for {', '.join(known)}")
    raise EngineError(f"the patch series is missing from {_PACKAGE}; install llamahybrid again")


def pin(version: str) -> Pin:
    """The sdist that a release's patches apply to."""
    return Pin(version, (folder(version) / "pin").read_text().strip())


def number(name: str) -> str:
    """The number of a patch (`reuse/0001-recurrent-rollback-planes.patch`)."""
    return Path(name).name[:4]


def set_of(name: str) -> str:
    """The set that a patch is in."""
    return name.rpartition("/")[0]


def sets(version: str) -> dict[str, str]:
    """The set of each patch of a release, by the number of the patch."""
    return {number(name): set_of(name) for name in patches(version)}


def patches(version: str, chosen: Sequence[str] | None = None) -> dict[str, str]:
    """A release's patches in the order of the series: file name to sha256.

    `chosen`: the sets to take; None: all.
    """
    home = folder(version)
    return {
        name: hashlib.sha256((home / name).read_bytes()).hexdigest()
        for name in (home / "series").read_text().split()
        if chosen is None or set_of(name) in chosen
    }


def apply(tree: Path, version: str, chosen: Sequence[str] | None = None) -> None:
    """Apply a release's patches (of the sets `chosen`; None: all) to a llama.cpp source tree, in order.

    Raises:
        EngineError: a patch does not apply, or git is missing.
    """
    if not shutil.which("git"):
        raise EngineError("applying the patches needs `git`; install it and try again")
    home = folder(version)
    for name in patches(version, chosen):
        command = ["git", "apply", "--whitespace=nowarn", str(home / name)]
        run = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
        if run.returncode:
            raise EngineError(
                f"{name} does not apply to {tree}: it is not the source that the series was made for\n"
                f"{run.stdout}{run.stderr}".rstrip()
            )


def environment(tree: Path) -> dict[str, str]:
    """The environment without variables and files that change the behaviour of git."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # in a repository above the tree git would silently skip files outside of it
    alone = {"GIT_CEILING_DIRECTORIES": str(tree.absolute().parent)}
    return {**kept, **alone, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def _home() -> Path:
    """The folder of all series, in an installed package or in a checkout."""
    inside = _PACKAGE / "patches"
    return inside if inside.is_dir() else _PACKAGE.parent / "patches"
