"""Carries a patch series over to another llama.cpp: each patch merged three-way in a git repository of both.

A patch that conflicts is left out and the next one tried, so that one look tells how much there is to do.
What is left out may be missed by those after it: a patch that merges need not compile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llamahybrid.engine import patched, sdist, series
from llamahybrid.engine.process import Progress
from llamahybrid.engine.sdist import Pin
from llamahybrid.engine.storage import disk_errors
from llamahybrid.errors import EngineError

_LOOK = re.compile(rb"^<{7} ", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A llama.cpp that a series is to be made for."""

    name: str
    """Of its patches' folder: the release, else the checkout's folder."""
    pin: Pin | None = None
    checkout: Path | None = None
    """Of llama-cpp-python or llama.cpp; None: the sdist of `pin`."""

    @classmethod
    def of(cls, what: str) -> Target:
        """That of a release (``0.3.37``), of an sdist's file or of a checkout's folder.

        Raises:
            EngineError: it is none of them, or pip could not get it.
        """
        path = Path(what)
        if path.is_dir():
            patched.kind(path)
            return cls(patched.version_of(path, default=path.resolve().name), checkout=path.resolve())
        if path.is_file():
            found = re.fullmatch(r"llama_cpp_python-([\w.]+)\.tar\.gz", path.name)
            if not found:
                raise EngineError(f"{path} is no sdist of llama-cpp-python: it is named otherwise")
            return cls(found.group(1), sdist.take(path, found.group(1)))
        if not re.fullmatch(r"\d+(\.\w+)+", what):
            raise EngineError(f"{what} is no release, no sdist and no folder")
        known = what in series.releases()
        return cls(what, series.pin(what) if known else sdist.obtain(what))

    def base(self) -> str:
        """The release whose patches are the likeliest to fit: the last one before it, else the first.

        Raises:
            EngineError: there is no other one.
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
    """What became of one patch."""

    name: str
    text: str = ""
    """The patch for the new source; empty: there is none."""
    conflicts: Mapping[str, int] = field(default_factory=dict)
    """File to the number of places in it that both sides change."""
    missing: tuple[str, ...] = ()
    """Files it changes that the new source has not: it goes without them, which is for a person to check."""

    @property
    def outcome(self) -> str:
        """In a few words."""
        if self.conflicts:
            places = sum(self.conflicts.values())
            return f"{places} conflict{'s' * (places != 1)} in {', '.join(self.conflicts)}"
        if not self.text:
            why = f"it changes {', '.join(self.missing)} alone" if self.missing else "upstream has it"
            return f"nothing is left of it: {why}"
        return f"merged without {', '.join(self.missing)}" if self.missing else "merged"


@disk_errors()
def carry(target: Target, base: str, progress: Progress, keep: Path | None = None) -> list[Carried]:
    """Merge the series of the release `base` into `target`, in order.

    Args:
        target: what to carry it to.
        base: the release to begin with.
        progress: told of each step.
        keep: a new folder for the git tree, with a tag per patch of the old series, to go on by hand in.

    Raises:
        EngineError: git is missing, a source cannot be had, or `keep` is in the way.
    """
    if not shutil.which("git"):
        raise EngineError("merging patches needs `git`; install it and try again")
    if keep and keep.exists():
        raise EngineError(f"{keep} is in the way; remove it or name another folder")
    with tempfile.TemporaryDirectory(prefix="llamahybrid-rebase-") as scratch:
        room = Path(scratch)
        tree = keep or room / "tree"
        progress(0, 0, f"Unpacking {base} and {target.name}")
        git = _Git.start(tree)
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
            progress(number, len(names), f"Merging {name}")
            carried.append(_pick(git, name, commit))
        return carried


@disk_errors()
def vacant(folder: Path) -> None:
    """Raise EngineError where a folder has anything in it."""
    if folder.exists() and any(folder.iterdir()):
        raise EngineError(f"{folder} is in the way; remove it or name another folder")


@disk_errors()
def write(carried: list[Carried], target: Target, folder: Path) -> None:
    """Write what was merged as a series of its own: patches, their order, and the pin of a release.

    Raises:
        EngineError: there is one already.
    """
    vacant(folder)
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
    """A repository whose tree is `tree`."""

    tree: Path

    @classmethod
    def start(cls, tree: Path) -> _Git:
        """An empty one."""
        tree.mkdir(parents=True)
        git = cls(tree)
        git("init", "--quiet")
        for name, value in (
            ("user.name", "llamahybrid"),
            ("user.email", "llamahybrid@localhost"),
            ("core.autocrlf", "false"),
            ("core.hooksPath", "/dev/null"),
            ("commit.gpgSign", "false"),
            ("gc.auto", "0"),
            ("merge.conflictStyle", "merge"),
        ):
            git("config", name, value)
        return git

    def __call__(self, *arguments: str) -> str:
        """What a command prints.

        Raises:
            EngineError: it failed.
        """
        run = self.run(*arguments)
        if run.returncode:
            raise EngineError(f"git {arguments[0]} failed\n{run.stderr.strip() or run.stdout.strip()}")
        return run.stdout

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One command, whatever comes of it."""
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
        """A commit of all files of another folder; what its own .gitignore names stays out."""
        elsewhere = (f"--git-dir={self.tree / '.git'}", f"--work-tree={source}")
        self(*elsewhere, "read-tree", "--empty")
        self(*elsewhere, "-C", str(source), "add", "--all", ".")
        tree = self("write-tree").strip()
        return self("commit-tree", tree, "-m", message, *(("-p", parent) if parent else ())).strip()


@contextmanager
def _source(target: Target, room: Path) -> Iterator[Path]:
    """The llama.cpp of a target for as long as it is needed."""
    if target.checkout:
        yield target.checkout / patched.kind(target.checkout)
        return
    yield sdist.unpack(room, target.pin) / patched.LLAMA_CPP
    shutil.rmtree(room, ignore_errors=True)


def _pick(git: _Git, name: str, commit: str) -> Carried:
    """Merge one patch into the tree, which is left as it was where that does not work."""
    if git.run("cherry-pick", commit).returncode == 0:
        return Carried(name, _patch(git))
    unmerged = git("diff", "--name-only", "--diff-filter=U").split()
    missing = tuple(file for file in unmerged if not git("ls-files", "--stage", file).count(" 2\t"))
    conflicts = {
        file: max(1, len(_LOOK.findall((git.tree / file).read_bytes())))
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
