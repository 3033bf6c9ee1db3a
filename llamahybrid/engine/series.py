"""The patch series: what it holds, and applying it to the llama.cpp of an unpacked sdist."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from llamahybrid.errors import EngineError

_PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """Where `series` and its patches lie: inside an installed package, beside the package in a checkout.

    Raises:
        EngineError: neither has them.
    """
    for place in (_PACKAGE / "patches", _PACKAGE.parent / "patches"):
        if (place / "series").is_file():
            return place
    raise EngineError(f"the patch series is missing from {_PACKAGE}; install llamahybrid again")


def patches() -> dict[str, str]:
    """The patches in the order of the series: file name to sha256."""
    home = folder()
    return {
        name: hashlib.sha256((home / name).read_bytes()).hexdigest()
        for name in (home / "series").read_text().split()
    }


def apply(tree: Path) -> None:
    """Apply the series to a llama.cpp source tree, in order.

    Raises:
        EngineError: a patch does not apply, or there is neither `patch` nor `git` to apply it with.
    """
    home = folder()
    if shutil.which("patch"):
        command = ["patch", "-p1", "--batch", "--forward", "--fuzz=0", "-i"]
    elif shutil.which("git"):
        command = ["git", "apply", "--whitespace=nowarn"]
    else:
        raise EngineError("applying the patches needs `patch` or `git`; install one of them and try again")
    before = _leftovers(tree)
    for name in patches():
        run = subprocess.run(
            [*command, str(home / name)], cwd=tree, env=_environment(tree), capture_output=True, text=True
        )
        if run.returncode:
            raise EngineError(
                f"{name} does not apply to {tree}: it is not the source that the series was made for\n"
                f"{run.stdout}{run.stderr}".rstrip()
            )
    for file in _leftovers(tree) - before:
        file.unlink()


def _environment(tree: Path) -> dict[str, str]:
    """Without what makes either tool work elsewhere or otherwise than it does by itself."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GIT_", "PATCH_"))
        and name not in ("POSIXLY_CORRECT", "SIMPLE_BACKUP_SUFFIX", "VERSION_CONTROL")
    }
    # git leaves out, silently, what lies outside of a repository that it finds above the tree
    alone = {"GIT_CEILING_DIRECTORIES": str(tree.absolute().parent)}
    return {**kept, **alone, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def _leftovers(tree: Path) -> set[Path]:
    """What `patch` keeps of a file whose lines had moved."""
    return set(tree.rglob("*.orig"))
