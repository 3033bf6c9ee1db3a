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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llamahybrid.engine import patched, sdist, series
from llamahybrid.engine.process import Progress, display
from llamahybrid.engine.sdist import Pin
from llamahybrid.engine.storage import disk_errors, locked_build_dir
from llamahybrid.errors import EngineError

_CONFLICT = re.compile(rb"^<{7} ", re.MULTILINE)
_CONFIGURATION = {
    "user.name": "llamahybrid",
    "user.email": "llamahybrid@localhost",
    "core.autocrlf": "false",
    "core.hooksPath": "/dev/null",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "merge.conflictStyle": "merge",
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
            patched.kind(path)
            return cls(patched.version_of(path, default=path.resolve().name), checkout=path.resolve())
        if not re.fullmatch(r"\d+(\.\w+)+", name):
            raise EngineError(f"{name} is neither a release nor a folder")
        return cls(name, series.pin(name) if name in series.releases() else obtain(name))

    def base(self) -> str:
        """The release whose patches are likeliest to fit: the last one before this, else the first.

        Raises:
            EngineError: there is no other release.
        """
        others = [release for release in series.releases() if release != self.name]
        if not others:
            raise EngineError("there are no patches of another release to begin with")
        if not self.name[:1].isdigit():
            return others[-1]
        before = [release for release in others if series.order(release) < series.order(self.name)]
        return before[-1] if before else others[0]


@dataclass(frozen=True)
class Carried:
    """The result for one patch."""

    name: str
    text: str = ""
    """The patch for the new source; empty: none."""
    conflicts: Mapping[str, int] = field(default_factory=dict)
    """File to the number of conflicts in it."""
    missing: tuple[str, ...] = ()
    """Files of the patch that the new source lacks; the patch is merged without them."""

    @property
    def outcome(self) -> str:
        """A few words for the table."""
        if self.conflicts:
            places = sum(self.conflicts.values())
            return f"{places} conflict{'s' * (places != 1)} in {', '.join(self.conflicts)}"
        if not self.text:
            why = f"it changes {', '.join(self.missing)} alone" if self.missing else "upstream has it"
            return f"nothing is left of it: {why}"
        return f"merged without {', '.join(self.missing)}" if self.missing else "merged"


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
        EngineError: git is missing, a source is unavailable, or `keep` exists.
    """
    if not shutil.which("git"):
        raise EngineError("merging patches needs `git`; install it and try again")
    if keep and keep.exists():
        raise EngineError(f"{keep} is in the way; remove it or name another folder")
    with tempfile.TemporaryDirectory(prefix="llamahybrid-rebase-") as scratch:
        room = Path(scratch)
        progress(f"Unpacking {base} and {target.name}", 0, 0)
        git = _Git.start(keep or room / "tree")
        with _source(Target(base, series.pin(base)), room / "base") as source:
            old = git.commit(source, f"llama.cpp of llama-cpp-python {base}")
        with _source(target, room / "new") as source:
            new = git.commit(source, f"llama.cpp of {target.name}", parent=old)
        names = list(series.patches(base))
        git("reset", "--quiet", "--hard", old)
        git("am", "--quiet", "--keep-cr", *(str(series.folder(base) / name) for name in names))
        commits = git("rev-list", "--reverse", f"{old}..HEAD").split()
        for name, commit in zip(names, commits, strict=True):
            git("tag", name.removesuffix(".patch"), commit)
        git("reset", "--quiet", "--hard", new)
        carried = []
        for number, (name, commit) in enumerate(zip(names, commits, strict=True)):
            progress(f"Merging {name}", number, len(names))
            carried.append(_pick(git, name, commit))
        return carried


def require_empty(folder: Path) -> None:
    """Raise EngineError if a folder has anything in it."""
    if folder.exists() and any(folder.iterdir()):
        raise EngineError(f"{folder} is in the way; remove it or name another folder")


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


@dataclass(frozen=True)
class _Git:
    """A repository with the working tree `tree`."""

    tree: Path

    @classmethod
    def start(cls, tree: Path) -> _Git:
        """Create an empty repository."""
        tree.mkdir(parents=True)
        git = cls(tree)
        git("init", "--quiet")
        for name, value in _CONFIGURATION.items():
            git("config", name, value)
        return git

    def __call__(self, *arguments: str) -> str:
        """Run a git command and return its output. Raises EngineError if it fails."""
        run = self.run(*arguments)
        if run.returncode:
            raise EngineError(f"git {arguments[0]} failed\n{run.stderr.strip() or run.stdout.strip()}")
        return run.stdout

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a git command that may fail."""
        return subprocess.run(
            ["git", *arguments],
            cwd=self.tree,
            env=series.environment(self.tree),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )

    def commit(self, source: Path, message: str, parent: str = "") -> str:
        """Commit all files of another folder, except those in its .gitignore; return the commit's hash."""
        elsewhere = (f"--git-dir={self.tree / '.git'}", f"--work-tree={source}")
        self(*elsewhere, "read-tree", "--empty")
        self(*elsewhere, "-C", str(source), "add", "--all", ".")
        tree = self("write-tree").strip()
        return self("commit-tree", tree, "-m", message, *(("-p", parent) if parent else ())).strip()


@contextmanager
def _source(target: Target, room: Path) -> Iterator[Path]:
    """The llama.cpp of a target, removed afterwards if it was unpacked here."""
    if target.checkout:
        yield target.checkout / patched.kind(target.checkout)
        return
    yield sdist.unpack(room, target.pin) / patched.LLAMA_CPP
    shutil.rmtree(room, ignore_errors=True)


def _pick(git: _Git, name: str, commit: str) -> Carried:
    """Merge one patch into the tree; a conflict leaves the tree unchanged."""
    if git.run("cherry-pick", commit).returncode == 0:
        return Carried(name, _patch(git))
    unmerged = git("diff", "--name-only", "--diff-filter=U").split()
    missing = tuple(file for file in unmerged if not git("ls-files", "--stage", file).count(" 2\t"))
    conflicts = {
        file: max(1, len(_CONFLICT.findall((git.tree / file).read_bytes())))
        for file in unmerged
        if file not in missing
    }
    if conflicts:
        git("cherry-pick", "--abort")
        return Carried(name, conflicts=conflicts, missing=missing)
    if missing:
        git("rm", "--quiet", "--force", *missing)
    if git.run("diff", "--cached", "--quiet").returncode == 0:
        git("cherry-pick", "--skip")
        return Carried(name, missing=missing)
    git("-c", "core.editor=true", "cherry-pick", "--continue")
    return Carried(name, _patch(git), missing=missing)


def _patch(git: _Git) -> str:
    return git("format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--no-numbered")


def report(carried: list[Carried], target: Target, base: str, folder: Path | None, tree: Path | None) -> None:
    """Print the result for each patch with its tests, and what to do next."""
    print(f"the patches for {base} on {target.name}:")
    home = Path(__file__).parents[1]
    for patch in carried:
        tests = home.glob(f"*/test_{series.number(patch.name)}_*.py") if patch.text else ()
        named = "".join(f", {file.relative_to(home.parent).as_posix()}" for file in sorted(tests))
        print(f"  {patch.name.removesuffix('.patch')}: {patch.outcome}{named}")
    done = sum(bool(patch.text) and not patch.missing for patch in carried)
    print(f"{done} of {len(carried)} merged; a merged patch need not compile or cure its fault")
    picks = "; ".join(f"git cherry-pick {p.name.removesuffix('.patch')}" for p in carried if p.conflicts)
    if picks:
        print(f"by hand, in this order: cd {tree}; {picks}" if tree else "--tree FOLDER keeps the git tree")
    if folder:
        print(
            f"{folder}: with that release installed, run\n"
            '  lib=$(llamahybrid engine build); llamahybrid hazards --lib "$lib"\n'
            '  LLAMAHYBRID_TEST_LIB="$lib" pytest tests/harness/hazards tests/patches'
        )


def main(arguments: list[str] | None = None) -> int:
    """Port the patches; return 1 if any is left to do by hand."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("target", help="release, folder of a checkout, or: latest")
    parser.add_argument("--base", help="release whose patches are ported; default: the one before")
    parser.add_argument("--out", type=Path, help="folder for the patches; default: patches/RELEASE here")
    parser.add_argument("--tree", type=Path, help="keep the git tree here, to go on by hand")
    parser.add_argument("--check", action="store_true", help="write no patches")
    given = parser.parse_args(arguments)
    try:
        name = latest() if given.target == "latest" else given.target
        if given.target == "latest" and name in series.releases():
            print(f"llama-cpp-python {name} is the newest release, and there are patches for it")
            return 0
        target = Target.of(name)
        base = given.base or target.base()
        folder = None if given.check else given.out or Path("patches") / target.name
        if folder:
            require_empty(folder)
        with display() as progress:
            carried = carry(target, base, progress, keep=given.tree)
        if folder:
            write(carried, target, folder)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(carried, target, base, folder, given.tree)
    return int(any(patch.conflicts or patch.missing for patch in carried))


if __name__ == "__main__":
    sys.exit(main())
