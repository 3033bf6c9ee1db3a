"""Files named by content: every byte counts, and what is remembered is never another file's."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from llamahybrid.engine import content
from llamahybrid.engine.content import Signature, digest

SIZE = 300_000
TICK = 0.02
"""Seconds, more than file systems take for one and the same time."""
MEMORY = "digests.json"


@pytest.fixture(autouse=True)
def setting(tmp_path, monkeypatch):
    """Every file is large, read in pieces by several threads, and settled; the user's folder is our own."""
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "SMALL", 0)
    monkeypatch.setattr(content, "PIECE", 1 << 16)
    monkeypatch.setattr(content, "THREADS", 3)
    monkeypatch.setattr(content, "SETTLED_SECONDS", 0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(SIZE))
    time.sleep(TICK)
    return path


@pytest.fixture
def reads(monkeypatch):
    """The files that were read."""
    found, read = [], content._read

    def counting(path, size, wanted):
        found.append(path)
        return read(path, size, wanted)

    monkeypatch.setattr(content, "_read", counting)
    return found


def flip(path, at):
    time.sleep(TICK)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("at", [0, 1, 65_535, 65_536, 150_000, SIZE - 1])
def test_one_bit_anywhere_makes_another_file(file, at):
    before = digest(file)
    flip(file, at)
    after = digest(file)
    flip(file, at)
    assert before != after
    assert digest(file) == before


def test_the_order_of_pieces_counts(file):
    whole, before = file.read_bytes(), digest(file)
    piece = content.PIECE
    file.write_bytes(whole[piece : 2 * piece] + whole[:piece] + whole[2 * piece :])
    assert digest(file) != before


def test_a_shorter_file_of_zeros_is_another(tmp_path):
    names = set()
    for n in (0, 1, 2, content.PIECE, content.PIECE + 1, 2 * content.PIECE):
        (tmp_path / "zeros").write_bytes(bytes(n))
        names.add(digest(tmp_path / "zeros"))
    assert len(names) == 6


def test_a_large_file_is_read_once(file, reads, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    assert digest(file) == digest(file) == digest(link)
    assert reads == [file]


def test_a_small_file_is_not_remembered(file, reads, monkeypatch, tmp_path):
    monkeypatch.setattr(content, "SMALL", SIZE)
    assert digest(file) == digest(file)
    assert len(reads) == 2
    assert not (tmp_path / "cache").exists()


def test_an_edit_that_hides_its_time_is_seen(file):
    status, before = file.stat(), digest(file)
    flip(file, 200_000)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns
    assert digest(file) != before


def test_a_file_changed_a_moment_ago_is_not_remembered(file, reads, monkeypatch):
    """The next change could get the same time stamps: those of the system's tick."""
    monkeypatch.setattr(content, "SETTLED_SECONDS", 60)
    assert digest(file) == digest(file)
    assert len(reads) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("files", "fails"),
        lambda text: "[]",
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: text.replace(json.loads(text)["checksum"], "0" * 16),
        lambda text: json.dumps(
            {**json.loads(text), "files": dict.fromkeys(json.loads(text)["files"], "0" * 32)}
        ),
        lambda text: json.dumps({"files": {"a": 7}, "checksum": content._checksum({"a": 7})}),
    ],
)
def test_a_damaged_memory_costs_reading_again(file, reads, tmp_path, damage):
    name, memory = digest(file), tmp_path / "cache" / MEMORY
    memory.write_text(damage(memory.read_text()))
    assert digest(file) == name
    assert digest(file) == name
    assert len(reads) == 2, "it is sound again"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_a_memory_that_others_could_have_written_is_not_believed(file, reads, tmp_path):
    digest(file)
    (tmp_path / "cache" / MEMORY).chmod(0o666)
    digest(file)
    assert len(reads) == 2


def test_a_folder_that_cannot_be_written_to_costs_reading_again(file, reads, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "occupied" / "cache"))
    assert digest(file) == digest(file)
    assert len(reads) == 2


def test_a_user_without_a_home_folder_reads_again(file, reads, monkeypatch):
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", "~nobody-of-that-name")
    assert digest(file) == digest(file)
    assert len(reads) == 2


def test_nothing_is_left_beside_the_memory(file, tmp_path, monkeypatch):
    digest(file)
    flip(file, 0)
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    digest(file)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [MEMORY]


def test_the_memory_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "REMEMBERED", 3)
    for n in range(5):
        (tmp_path / f"{n}").write_bytes(bytes([n]))
        digest(tmp_path / f"{n}")
    known = [content._Memory.here().find(Signature.of(tmp_path / f"{n}")) is not None for n in range(5)]
    assert known == [False, False, True, True, True]


def test_a_file_that_is_written_to_meanwhile_has_no_name(file, monkeypatch):
    read = content._read

    def slow(path, size, wanted):
        name = read(path, size, wanted)
        flip(path, 5)
        return name

    monkeypatch.setattr(content, "_read", slow)
    with pytest.raises(OSError, match="written to"):
        digest(file)


def test_a_file_that_gets_shorter_meanwhile_has_no_name(file):
    with pytest.raises(OSError, match="ends before"):
        content._read(file, SIZE + content.PIECE, lambda: True)


def test_what_is_no_file_has_no_name_and_does_not_block(tmp_path):
    with pytest.raises(OSError, match="not a regular file"):
        digest(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(OSError, match="not a regular file"):
            digest(tmp_path / "fifo")


def test_reading_ends_when_nobody_wants_it(file, monkeypatch):
    asked = []
    with pytest.raises(content.Abandoned):
        digest(file, lambda: asked.append(1) or len(asked) < 2)
    assert not [t for t in threading.enumerate() if t.name.startswith("llamahybrid-read")]


def test_two_processes_may_read_at_once(file, tmp_path, monkeypatch):
    code = (
        "import sys; from pathlib import Path; from llamahybrid.engine import content; content.SMALL = 0;"
        "content.SETTLED_SECONDS = 0; print(content.digest(Path(sys.argv[1])).hex())"
    )
    run = [sys.executable, "-c", code, str(file)]
    both = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate()[0].strip() for process in both}
    monkeypatch.setattr(content, "PIECE", 16 << 20)
    assert names == {content._read(file, SIZE, lambda: True).hex()}
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [MEMORY]
