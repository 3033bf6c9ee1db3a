"""Random histories on a folder where things go wrong that pass, and things lie that are not ours.

File descriptors run out, files cannot be opened for a while, others may write to the folder, links and made
up records lie in it, records are damaged or vanish, an older and a newer version keep theirs beside ours.
After every step: nothing outside our own folder has changed, no sound record is gone. Used by `disk_fuzz`.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache import disk, refusals
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.disk import ORPHAN_SECONDS, RecordStore
from llamahybrid.prompt_cache.disk_folder import FOLDER
from llamahybrid.prompt_cache.envelope import MAGIC, sealed
from llamahybrid.prompt_cache.records import key_of, pack
from tests.lab.disk_fuzz import check_record, hasty, turn
from tests.lab.integrity import check_integrity

PASSING = (errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOMEM)
SPARE_DESCRIPTORS = 64
UNLIMITED = 1 << 40


class History:
    """One folder and what happens to it; a step raises AssertionError when something is lost or touched."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.root, self.folder = root, root / "cache"
        self.own = self.folder / FOLDER
        self._furnish()
        self.outside = self._outside()
        self.done: Counter[str] = Counter()
        self.expendable: set[str] = set()
        """Keys that may go: damaged, made up, or removed by somebody else."""
        self.cache: PromptCache = hasty(self.folder, UNLIMITED)

    def run(self, steps: int) -> Counter[str]:
        """So many random steps; how often each was taken."""
        kinds = [
            self.ask,
            self.ask,
            self.restart,
            self.starve_of_descriptors,
            self.refuse_for_a_while,
            self.let_others_write,
            self.damage,
            self.make_up,
            self.link,
            self.vanish,
            self.leave_a_part,
        ]
        for _ in range(steps):
            step = self.rng.choice(kinds)
            self.done[step.__name__] += 1
            before = self._keys()
            step()
            self.cache.flush(30)
            lost = before - self._keys() - self.expendable
            assert not lost, f"{step.__name__} lost {len(lost)} sound records"
            assert self._outside() == self.outside, f"{step.__name__} touched something outside our folder"
            check_integrity(self.cache)
        self._all_right()
        return self.done

    # -- steps -------------------------------------------------------------------------------------

    def ask(self) -> None:
        """A request, with what it leaves on disk."""
        turn(self.cache, self.rng)

    def restart(self) -> None:
        """Another process."""
        self.cache.close()
        self.cache = hasty(self.folder, UNLIMITED)

    def starve_of_descriptors(self) -> None:
        """Every file descriptor is taken for a moment, as on a busy server."""
        self.cache.flush(30)
        with no_descriptors():
            for _ in range(3):
                turn(self.cache, self.rng)
            self.cache.flush(30)
            with suppress(AssertionError):  # it may well not open
                hasty(self.folder, UNLIMITED).close()

    def refuse_for_a_while(self) -> None:
        """Files cannot be opened, or folders not be listed: a network disk that is away."""
        code = self.rng.choice(PASSING)
        with failing(self.rng.choice(("opened", "os.scandir")), code):
            for _ in range(3):
                turn(self.cache, self.rng)
            self.cache.flush(30)
            PromptCache(1 << 20, self.folder).close()

    def let_others_write(self) -> None:
        """A folder that others may write to is not opened."""
        mode = self.folder.stat().st_mode
        self.folder.chmod(0o777)
        before = _listing(self.own)
        cache = PromptCache(1 << 20, self.folder)
        turn(cache, self.rng)
        assert cache.close()
        assert cache.disk is None, "a folder that others may write to was taken"
        assert _listing(self.own) == before, "a folder that was refused has changed"
        self.folder.chmod(mode)

    def damage(self) -> None:
        """Bits of a record flip."""
        for path in self._some_records():
            raw = bytearray(path.read_bytes())
            raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(raw)
        turn(self.cache, self.rng)

    def make_up(self) -> None:
        """Somebody puts a record there that none is, or one that lies."""
        length = self.rng.randrange(1, 50)
        tokens = np.array([self.rng.randrange(1000) for _ in range(length)], np.int32)
        key = key_of(f"model {self.rng.random()}", length, tokens)
        state = sealed(np.zeros(9, np.uint8), namespace="made up", tokens=tokens)
        raw = bytearray(b"".join(pack(state, tokens, None)))
        if self.rng.random() < 0.5:
            raw = bytearray(self.rng.randbytes(self.rng.randrange(400)))
        (self.own / key[0]).mkdir(mode=0o700, exist_ok=True)
        (self.own / key[0] / f"{key}.record").write_bytes(raw)
        self.expendable.add(key)
        turn(self.cache, self.rng)

    def link(self) -> None:
        """A link with a record's name leads out of the folder; it goes again."""
        key = key_of("linked", 1, np.array([self.rng.randrange(1 << 20)], np.int32))
        path = self.own / key[0] / f"{key}.record"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.symlink_to(self.root / "home" / "thesis.tex")
        self.restart()
        turn(self.cache, self.rng)
        assert path.is_symlink(), "a link was taken for a record"
        path.unlink()

    def vanish(self) -> None:
        """Another process evicts records."""
        for path in self._some_records():
            path.unlink()
        turn(self.cache, self.rng)

    def leave_a_part(self) -> None:
        """A process was killed long ago while it wrote; the next start sweeps up."""
        shard = self.own / "0"
        shard.mkdir(mode=0o700, exist_ok=True)
        part = shard / f"{self.rng.randrange(1 << 64):016x}.part"
        part.write_bytes(b"half a reco")
        past = part.stat().st_mtime - 2 * ORPHAN_SECONDS
        os.utime(part, (past, past))
        self.restart()
        assert not part.exists(), "an old part was left"

    # -- what is there -----------------------------------------------------------------------------

    def _furnish(self) -> None:
        """What is the user's, another format's, another version's."""
        (self.root / "home").mkdir()
        (self.root / "home" / "thesis.tex").write_text("my only copy")
        self.folder.mkdir(mode=0o700)
        (self.folder / "notes.txt").write_text("mine")
        for place, name in (("ab/cd", "0" * 28 + ".val"), ("llamahybrid-4/a", "newer.record")):
            (self.folder / place).mkdir(parents=True)
            (self.folder / place / name).write_bytes(MAGIC + b"of another format")

    def _outside(self) -> dict[str, tuple[int, bytes]]:
        listing = _listing(self.root)
        inside = os.path.join("cache", FOLDER)
        return {name: what for name, what in listing.items() if not name.startswith(inside)}

    def _keys(self) -> set[str]:
        return set(RecordStore(self.folder).keys())

    def _some_records(self) -> list[Path]:
        there = sorted(self.own.glob("*/*.record"))
        chosen = self.rng.sample(there, min(len(there), self.rng.randrange(4)))
        self.expendable.update(path.stem for path in chosen)
        return chosen

    def _all_right(self) -> None:
        """Every record that was not tampered with is sound."""
        store = RecordStore(self.folder)
        for key in self._keys() - self.expendable:
            try:
                check_record(store, key)
            except RecordError as error:
                raise AssertionError(f"{key}: {error}") from error


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing in here."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sinks: list[int] = []
    highest = max((int(name) for name in os.listdir("/dev/fd")), default=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, highest + SPARE_DESCRIPTORS), hard))
    try:
        with suppress(OSError):
            while True:
                sinks.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for sink in sinks:
            os.close(sink)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def failing(name: str, code: int) -> Iterator[None]:
    """A function that the disk tier opens or lists with raises an error in here."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    owner: Any = disk
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real: Callable[..., Any] = getattr(owner, last)
    setattr(owner, last, fail)
    try:
        yield
    finally:
        setattr(owner, last, real)


def _listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that lies in a folder: when it was changed, and what is in it; links are not followed."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        text = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (0 if path.is_dir() else status.st_mtime_ns, text)
    return found


def histories(count: int, seed: int, steps: int) -> Counter[str]:
    """So many histories of so many steps; how often each step was taken. Raises AssertionError."""
    done: Counter[str] = Counter()
    said = refusals.FIRST_BACKOFF_SECONDS, refusals.UNREADABLE_SECONDS
    # A disk that refused is tried again at once: more happens.
    refusals.FIRST_BACKOFF_SECONDS = refusals.UNREADABLE_SECONDS = 0.0
    try:
        for number in range(seed, seed + count):
            with tempfile.TemporaryDirectory() as root:
                try:
                    done += History(Path(root), number).run(steps)
                except AssertionError as error:
                    raise AssertionError(f"seed {number}: {error}") from error
    finally:
        refusals.FIRST_BACKOFF_SECONDS, refusals.UNREADABLE_SECONDS = said
    return done
