"""Port the patch series to another llama.cpp: `python -m tests.lab.rebase 0.3.37`.

Each patch is merged three-way in a git repository of both sources. A patch that conflicts is left out and the
next one tried, so that one run shows all that is left to do. Later patches may depend on one that was left
out: a patch that merges need not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamahybrid.engine import patched, sdist, series
from llamahybrid.engine.process import Progress, display
from llamahybrid.engine.sdist import Pin
from llamahybrid.engine.storage import disk_errors, locked_build_dir
from llamahybrid.errors import EngineError

_CONFIGURATION = {
    "user.name": "llamahybrid",
    "user.email": "llamahybrid@localhost",
    "core.autocrlf": "false",
    "core.hooksPath": "/dev/null",
    "gc.auto": "0",
}


@dataclass(frozen=True)
class Target:
    """The llama.cpp to port a series to."""

    name: str
    """Name of the new patches' folder: the release, or the checkout's folder."""
    pin: Pin | None = None
    checkout: Path | None = None
    """A tree of llama-cpp-python or llama.cpp; None: the sdist of `pin`."""

    @classmethod
    def of(cls, name: str) -> Target:
        """Parse a release (``0.3.37``) or the folder of a checkout.

        Raises:
            EngineError: it is neither, or pip could not download the release.
        """
        path = Path(name)
        if path.is_dir():
            return cls(patched.version_of(path, default=path.resolve().name), checkout=path.resolve())
        if not re.fullmatch(r"\d+(\.\w+)+", name):
            raise EngineError(f"{name} is neither a release nor a folder")
        return cls(name, series.pin(name) if name in series.releases() else obtain(name))

    def source(self, room: Path) -> Path:
        """The folder of llama.cpp, unpacked in `room` unless it is a checkout."""
        if self.checkout:
            return self.checkout / patched.kind(self.checkout)
        return sdist.unpack(room, self.pin) / patched.LLAMA_CPP


@dataclass(frozen=True)
class Carried:
    """The result for one patch."""

    name: str
    text: str = ""
    """The patch for the new source; empty: none."""
    conflicts: Sequence[str] = ()
    """Files that git could not merge, those that the new source lacks among them."""

    @property
    def outcome(self) -> str:
        if self.conflicts:
            return f"conflicts in {', '.join(self.conflicts)}"
        return "merged" if self.text else "upstream has it"


def latest() -> str:
    """The newest release that pip finds.

    Raises:
        EngineError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", "llama-cpp-python"]
    run = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^Available versions: ([\w.+]+)", run.stdout, re.MULTILINE)
    if run.returncode or not found:
        raise EngineError(f"pip does not say which releases there are\n{run.stderr.strip()}")
    return found.group(1)


@disk_errors()
def obtain(version: str) -> Pin:
    """Download a release of unknown hash, replacing any copy in the cache; return the pin of the download.

    Raises:
        EngineError: pip failed, or this Python cannot unpack an untrusted archive safely.
    """
    if not hasattr(tarfile, "data_filter"):
        raise EngineError("sources that are not pinned are unpacked by Python 3.10.12, 3.11.4 or newer")
    pin = Pin(version, "")
    path = sdist.cache_dir() / "sdist" / pin.archive
    with locked_build_dir(path) as folder:
        os.replace(sdist.download(folder, pin), path)
    return Pin(version, sdist.sha256(path))


@disk_errors()
def carry(target: Target, base: str, progress: Progress, keep: Path | None = None) -> list[Carried]:
    """Merge the series of the release `base` into `target`, in order.

    Args:
        target: the new source.
        base: the release whose patches are ported.
        progress: receives each step.
        keep: a new folder for the git tree, with a tag for each old patch, to go on by hand.

    Raises:
        EngineError: git is missing, a source is unavailable, or `keep` has anything in it.
    """
    if not shutil.which("git"):
        raise EngineError("merging patches needs `git`; install it and try again")
    require_empty(keep)
    with tempfile.TemporaryDirectory(prefix="llamahybrid-rebase-") as scratch:
        progress(f"Unpacking {base} and {target.name}", 0, 0)
        git = _Git(keep or Path(scratch, "tree"))
        git("init", "--quiet")
        for name, value in _CONFIGURATION.items():
            git("config", name, value)
        sources = Target(base, series.pin(base)), target
        for number, source in enumerate(sources):
            git.commit(source.source(Path(scratch, str(number))), f"llama.cpp of {source.name}")
        new = git("rev-parse", "HEAD").strip()
        git("reset", "--quiet", "--hard", "HEAD~")
        names = list(series.patches(base))
        for name in names:
            git("am", "--quiet", "--keep-cr", str(series.folder(base) / name))
            git("tag", tag(name))
        git("reset", "--quiet", "--hard", new)
        carried = []
        for number, name in enumerate(names):
            progress(f"Merging {name}", number, len(names))
            carried.append(_pick(git, name))
        return carried


def require_empty(folder: Path | None) -> None:
    """Raise EngineError if a folder has anything in it."""
    if folder and folder.exists() and any(folder.iterdir()):
        raise EngineError(f"{folder} is in the way; remove it or name another folder")


def tag(name: str) -> str:
    """The tag of an old patch in the git tree."""
    return name.removesuffix(".patch")


@disk_errors()
def write(carried: list[Carried], target: Target, folder: Path) -> None:
    """Write the merged patches as a series: patches, `series`, and `pin` for a release.

    Raises:
        EngineError: the folder is not empty.
    """
    require_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    merged = [patch for patch in carried if patch.text]
    for patch in merged:
        (folder / patch.name).parent.mkdir(exist_ok=True)
        (folder / patch.name).write_text(patch.text, encoding="utf-8", newline="")
    if target.pin:
        (folder / "pin").write_text(f"{target.pin.sha256}\n")
    (folder / "series").write_text("".join(f"{patch.name}\n" for patch in merged))


class _Git:
    """A repository with the working tree `tree`."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        tree.mkdir(parents=True, exist_ok=True)

    def __call__(self, *arguments: str) -> str:
        """Run a git command and return its output. Raises EngineError if it fails."""
        run = self.run(*arguments)
        if run.returncode:
            raise EngineError(f"git {arguments[0]} failed\n{run.stderr.strip() or run.stdout.strip()}")
        return run.stdout

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments],
            cwd=self.tree,
            env=series.environment(self.tree),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )

    def commit(self, source: Path, message: str) -> None:
        """Commit all files of another folder, except those in its .gitignore."""
        elsewhere = (f"--git-dir={self.tree / '.git'}", f"--work-tree={source}")
        self(*elsewhere, "-C", str(source), "add", "--all", ".")
        self(*elsewhere, "commit", "--quiet", "--message", message)


def _pick(git: _Git, name: str) -> Carried:
    """Merge one patch into the tree; a conflict leaves the tree unchanged."""
    if git.run("cherry-pick", tag(name)).returncode:
        conflicts = git("diff", "--name-only", "--diff-filter=U").split()
        git("cherry-pick", "--abort" if conflicts else "--skip")
        return Carried(name, conflicts=conflicts)
    return Carried(
        name, git("format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--no-numbered")
    )


def report(carried: list[Carried], target: Target, base: str, folder: Path | None, tree: Path | None) -> None:
    """Print the result for each patch with its tests, and what to do next."""
    print(f"the patches for {base} on {target.name}:")
    home = Path(__file__).parents[1]
    for patch in carried:
        tests = home.glob(f"*/test_{series.number(patch.name)}_*.py") if patch.text else ()
        named = "".join(f", {file.relative_to(home.parent).as_posix()}" for file in sorted(tests))
        print(f"  {tag(patch.name)}: {patch.outcome}{named}")
    done = sum(bool(patch.text) for patch in carried)
    print(f"{done} of {len(carried)} merged; a merged patch need not compile or cure its fault")
    picks = "; ".join(f"git cherry-pick {tag(patch.name)}" for patch in carried if patch.conflicts)
    if picks:
        print(f"by hand, in this order: cd {tree}; {picks}" if tree else "--tree FOLDER keeps the git tree")
    if folder:
        print(
            f"{folder}: with that release installed, run\n"
            '  lib=$(llamahybrid engine build); llamahybrid hazards --lib "$lib"\n'
            '  LLAMAHYBRID_TEST_LIB="$lib" pytest tests/harness/hazards tests/patches'
        )


def main(arguments: list[str] | None = None) -> int:
    """Port the patches of the newest other release; return 1 if any is left to do by hand."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("target", help="release, folder of a checkout, or: latest")
    parser.add_argument("--tree", type=Path, help="keep the git tree here, to go on by hand")
    parser.add_argument("--check", action="store_true", help="write no patches to patches/RELEASE")
    given = parser.parse_args(arguments)
    try:
        name = latest() if given.target == "latest" else given.target
        if given.target == "latest" and name in series.releases():
            print(f"llama-cpp-python {name} is the newest release, and there are patches for it")
            return 0
        target = Target.of(name)
        base = next((release for release in series.releases()[::-1] if release != target.name), "")
        folder = None if given.check else Path("patches") / target.name
        require_empty(folder)
        with display() as progress:
            carried = carry(target, base, progress, keep=given.tree)
        if folder:
            write(carried, target, folder)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(carried, target, base, folder, given.tree)
    return int(any(patch.conflicts for patch in carried))


if __name__ == "__main__":
    sys.exit(main())
