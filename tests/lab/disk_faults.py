"""Random histories on a folder where things go wrong that pass, and things lie that are not ours.

File descriptors run out, files cannot be opened for a while, others may write to the folder, rows and records
are damaged or vanish, links and files of killed processes lie in it, an older and a newer version keep theirs
beside ours. After every step: nothing outside our own folder has changed, no sound record is gone. Used by
`disk_fuzz`."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache import breaker, disk, loading
from llamahybrid.prompt_cache.bytes_disk import SHARDS
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.disk import ORPHAN_SECONDS, DiskRows
from llamahybrid.prompt_cache.folder import FOLDER, FOREIGN
from tests.lab.disk_fuzz import check_record, hasty, stored, turn
from tests.lab.integrity import check_integrity, check_ram

PASSING = (errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOMEM)
SPARE_DESCRIPTORS = 64
UNLIMITED = 1 << 40


class History:
    """A cache folder and random steps on it; a step raises AssertionError for a lost record."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.root, self.folder = root, root / "cache"
        self.own = self.folder / FOLDER
        self._furnish()
        self.outside = self._outside()
        self.done: Counter[str] = Counter()
        self.expendable: set[bytes] = set()
        """Keys that may go: damaged, or removed by somebody else."""
        self.before: set[bytes] = set()
        self.cache: PromptCache = hasty(self.folder, UNLIMITED)

    def run(self, steps: int) -> Counter[str]:
        """Take `steps` random steps; return how often each was taken."""
        kinds = [
            self.ask,
            self.ask,
            self.restart,
            self.starve_of_descriptors,
            self.refuse_for_a_while,
            self.hold_the_lock,
            self.let_others_write,
            self.damage,
            self.damage_a_row,
            self.link,
            self.vanish,
            self.leave_a_file,
        ]
        for _ in range(steps):
            step = self.rng.choice(kinds)
            self.done[step.__name__] += 1
            before = self.before = set(self._records())
            step()
            self.cache.flush(30)
            lost = before - set(self._records()) - self.expendable
            assert not lost, f"{step.__name__} lost {len(lost)} sound records"
            assert self._outside() == self.outside, f"{step.__name__} touched something outside our folder"
            (check_ram if self.done["damage_a_row"] else check_integrity)(self.cache)
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
        """Files cannot be opened, or folders not be listed."""
        code = self.rng.choice(PASSING)
        with failing(self.rng.choice(("opened", "os.scandir")), code):
            for _ in range(3):
                turn(self.cache, self.rng)
            self.cache.flush(30)
            PromptCache(1 << 20, self.folder).close()

    def hold_the_lock(self) -> None:
        """Another process changes the folder for a moment; requests go on."""
        other = sqlite3.connect(self.own / FOREIGN, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            turn(self.cache, self.rng)
        other.execute("ROLLBACK")
        other.close()

    def let_others_write(self) -> None:
        """A folder that others may write to is not opened."""
        mode = self.folder.stat().st_mode
        self.folder.chmod(0o777)
        cache = PromptCache(1 << 20, self.folder)
        turn(cache, self.rng)
        assert cache.close()
        assert cache.disk is None, "a folder that others may write to was taken"
        self.folder.chmod(mode)

    def damage(self) -> None:
        """Bits of a record flip."""
        for path in self._some_files():
            raw = bytearray(path.read_bytes())
            raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(raw)
        turn(self.cache, self.rng)

    def damage_a_row(self) -> None:
        """Bits of a row flip: what it leads to is lost, and nothing wrong comes of it."""
        self.cache.flush(30)
        self.expendable |= self.before | set(self._records())
        other = sqlite3.connect(self.own / FOREIGN, isolation_level=None, timeout=30)
        rows = other.execute("SELECT rowid, value FROM Cache WHERE filename IS NULL").fetchall()
        for rowid, value in self.rng.sample(rows, min(len(rows), 1)):
            raw = bytearray(value)
            raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
            other.execute("UPDATE Cache SET value = ? WHERE rowid = ?", (bytes(raw), rowid))
        other.close()
        turn(self.cache, self.rng)

    def link(self) -> None:
        """A link with a record's name leads out of the folder; it goes again."""
        path = self.own / "00" / f"{self.rng.randrange(1 << 160):040x}-00000000.val"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.symlink_to(self.root / "home" / "thesis.tex")
        self.restart()
        turn(self.cache, self.rng)
        assert path.is_symlink(), "a link was taken for a record"
        path.unlink()

    def vanish(self) -> None:
        """Remove files of records."""
        for path in self._some_files():
            path.unlink()
        turn(self.cache, self.rng)

    def leave_a_file(self) -> None:
        """A process was killed long ago while it wrote; a sweep removes what it left."""
        path = self.own / "00" / f"{self.rng.randrange(1 << 160):040x}-00000000.val"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(b"half a reco")
        past = path.stat().st_mtime - 2 * ORPHAN_SECONDS
        os.utime(path, (past, past))
        rows = DiskRows(self.folder)
        rows.open()
        assert sum(rows.sweep(shard) for shard in range(SHARDS)), "an old file was left"

    # -- records and files -----------------------------------------------------------------------------

    def _furnish(self) -> None:
        """Create files of the user, of another format and of another version."""
        (self.root / "home").mkdir()
        (self.root / "home" / "thesis.tex").write_text("my only copy")
        self.folder.mkdir(mode=0o700)
        (self.folder / "notes.txt").write_text("mine")
        others = (
            ("ab/cd", "0" * 28 + ".val"),
            ("llamahybrid-3/a", "older.record"),
            ("llamahybrid-5", "cache.db"),
        )
        for place, name in others:
            (self.folder / place).mkdir(parents=True)
            (self.folder / place / name).write_bytes(b"of another format")

    def _outside(self) -> dict[str, tuple[int, bytes]]:
        inside = os.path.join("cache", FOLDER)
        found: dict[str, tuple[int, bytes]] = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if not name.startswith(inside):
                own = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                found[name] = (0 if path.is_dir() else path.lstat().st_mtime_ns, own)
        return found

    def _records(self) -> list[bytes]:
        return list(stored(self.folder)[1])

    def _some_files(self) -> list[Path]:
        there = sorted(self.own.glob("*/*.val"))
        chosen = self.rng.sample(there, min(len(there), self.rng.randrange(4)))
        self.expendable |= {b"r" + bytes.fromhex(path.parent.name + path.name[:40]) for path in chosen}
        return [path for path in chosen if not path.is_symlink()]

    def _all_right(self) -> None:
        """Every record that was not tampered with is sound."""
        store, there = stored(self.folder)
        for key in there.keys() - self.expendable:
            try:
                check_record(store, *there[key])
            except RecordError as error:
                raise AssertionError(f"{key.hex()}: {error}") from error


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


def histories(count: int, seed: int, steps: int) -> Counter[str]:
    """Run `count` histories of `steps` steps; return how often each step was taken. Raises AssertionError."""
    done: Counter[str] = Counter()
    alone: Any = loading
    said = breaker.FIRST_BACKOFF_SECONDS, alone.UNREADABLE_SECONDS
    # A disk that failed is tried again at once: more happens.
    breaker.FIRST_BACKOFF_SECONDS = alone.UNREADABLE_SECONDS = 0.0
    try:
        for number in range(seed, seed + count):
            with tempfile.TemporaryDirectory() as root:
                try:
                    done += History(Path(root), number).run(steps)
                except AssertionError as error:
                    raise AssertionError(f"seed {number}: {error}") from error
    finally:
        breaker.FIRST_BACKOFF_SECONDS, alone.UNREADABLE_SECONDS = said
    return done
