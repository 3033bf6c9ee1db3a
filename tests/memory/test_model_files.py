"""A model is what its files hold: every bit and every shard, wherever they lie and whenever they changed."""

import os
import shutil
import struct
import threading
import time

import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.engine import content
from llamahybrid.memory import model_files
from llamahybrid.memory.model_files import ModelFiles, shards
from tests.conftest import SETTINGS, take

from .conftest import LONGER, PROMPT, named, overwritten, replaced, stock

pytestmark = pytest.mark.usefixtures("user_folder")

TICK = 0.02


@pytest.fixture
def large(monkeypatch):
    """Any file is a large one, that the file system has known for long."""
    monkeypatch.setattr(content, "SMALL", 0)
    monkeypatch.setattr(model_files, "SMALL", 0)
    monkeypatch.setattr(content, "SETTLED_SECONDS", 0)


@pytest.fixture
def reads(monkeypatch):
    """Paths that were read whole."""
    found, read = [], content._read
    monkeypatch.setattr(content, "_read", lambda path, *rest: found.append(path) or read(path, *rest))
    return found


# -- the model's content ---------------------------------------------------------------------------


def other_weights(path, out, at=None):
    """A copy with one bit of one weight changed, far into the file."""
    shutil.copy(path, out)
    with out.open("r+b") as file:
        file.seek(at or path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return out


def test_one_bit_makes_another_model(tiny_model, tmp_path):
    path = tiny_model("qwen35")
    assert named(other_weights(path, tmp_path / "other.gguf")) != named(path)


def test_the_place_of_a_model_does_not_count(tiny_model, tmp_path, monkeypatch):
    path = tiny_model("qwen35")
    moved = tmp_path / "elsewhere.gguf"
    shutil.copy(path, moved)
    (tmp_path / "link.gguf").symlink_to(moved)
    monkeypatch.chdir(tmp_path)
    assert {named(path), named(moved), named("elsewhere.gguf"), named("./link.gguf")} == {named(path)}


def test_what_goes_to_disk_is_named_by_content(tiny_model, tmp_path, large, reads):
    path, copy = tiny_model("qwen35"), tmp_path / "copy.gguf"
    shutil.copy(path, copy)
    first = Llama(str(path), prompt_cache=PromptCache(1 << 28, tmp_path / "disk"), **SETTINGS)
    take(first, PROMPT)
    first.prompt_cache.close()
    second = Llama(str(copy), prompt_cache=PromptCache(1 << 28, tmp_path / "disk"), **SETTINGS)
    assert take(second, PROMPT) == stock(path, PROMPT)
    assert second.last_request.source == "disk"
    edited = other_weights(path, tmp_path / "edited.gguf")
    third = Llama(str(edited), prompt_cache=PromptCache(1 << 28, tmp_path / "disk"), **SETTINGS)
    take(third, PROMPT)
    assert third.last_request.cached == 0
    Llama(str(path), prompt_cache=PromptCache(1 << 28, tmp_path / "disk"), **SETTINGS)
    assert reads.count(path) == 1, "it is remembered"


def test_within_a_process_a_large_model_is_not_read(tiny_model, tmp_path, large, reads):
    path = tiny_model("qwen35")
    cache = PromptCache(1 << 28)
    first, second = (Llama(str(path), prompt_cache=cache, **SETTINGS) for _ in range(2))
    take(first, PROMPT)
    assert take(second, PROMPT) == stock(path, PROMPT)
    assert second.last_request.cached == len(PROMPT)
    assert path not in reads


def hidden(path, other):
    status = path.stat()
    overwritten(path, other)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, overwritten, hidden])
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_model_changed_between_two_loads_is_another(tiny_model, tmp_path, request, change, size):
    if size == "large":
        request.getfixturevalue("large")
    path, cache = tmp_path / "model.gguf", PromptCache(1 << 28)
    shutil.copy(tiny_model("qwen35"), path)
    time.sleep(TICK)
    first = Llama(str(path), prompt_cache=cache, use_mmap=False, **SETTINGS)
    take(first, PROMPT)
    change(path, tiny_model("qwen35", seed=1))
    second = Llama(str(path), prompt_cache=cache, **SETTINGS)
    assert take(second, PROMPT) == stock(path, PROMPT)
    assert second.last_request.cached == 0
    assert take(first, LONGER) == stock(tiny_model("qwen35"), LONGER)


def test_a_model_written_twice_in_one_moment_is_two(tiny_model, tmp_path, monkeypatch):
    """Time stamps do not tell: they are as coarse as the system's tick."""
    monkeypatch.setattr(content, "SMALL", 0)
    monkeypatch.setattr(model_files, "SMALL", 0)
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen35"), path)
    signature = content.Signature(1, 1, 1000, time.time_ns(), 0)
    monkeypatch.setattr(content.Signature, "of", classmethod(lambda cls, p: signature))
    monkeypatch.setattr(content, "_read", lambda path, size, wanted: path.read_bytes()[-16:])
    first = ModelFiles(path, by_content=False).name
    path.write_bytes(b"another model...")
    assert ModelFiles(path, by_content=False).name != first


@pytest.mark.parametrize("by_content", [False, True])
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_model_written_to_while_it_is_loaded_has_no_name(tiny_model, tmp_path, request, by_content, size):
    if size == "large":
        request.getfixturevalue("large")
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen35"), path)
    files = ModelFiles(path, by_content=by_content)
    for thread in threading.enumerate():
        if thread.name == "llamahybrid-read":
            thread.join()
    time.sleep(TICK)
    overwritten(path, tiny_model("qwen35", seed=1))
    files.loaded(mapped=True)
    assert isinstance(files.name, content.Nameless)
    assert isinstance(files.content(), content.Nameless)


@pytest.mark.parametrize("mapped", [False, True])
def test_an_edit_counts_once_and_only_where_pages_are_still_read(tmp_path, mapped):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    files = ModelFiles(path, by_content=False)
    files.loaded(mapped=mapped)
    name = files.name
    time.sleep(TICK)
    path.write_bytes(b"other weights")
    assert [files.edited(), files.edited()] == [mapped, False]
    assert (files.name == name) is not mapped


@pytest.mark.parametrize("change", [lambda path: path.chmod(0o400), lambda path: os.link(path, f"{path}-2")])
def test_what_changes_no_byte_of_a_mapped_model_is_no_edit(tmp_path, change):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    files = ModelFiles(path, by_content=False)
    files.loaded(mapped=True)
    name, noted = files.name, content.Signature.of(path)
    time.sleep(TICK)
    change(path)
    assert content.Signature.of(path).ctime_ns != noted.ctime_ns
    assert not files.edited()
    assert files.name == name


def test_a_failed_load_gives_up_reading(tmp_path, monkeypatch, large):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    made = []
    monkeypatch.setattr(
        "llamahybrid.llama.ModelFiles", lambda *a, **kw: made.append(ModelFiles(*a, **kw)) or made[-1]
    )
    with pytest.raises(ValueError, match="Failed to load"):
        Llama(str(path), prompt_cache=PromptCache(1 << 20, tmp_path / "disk"), **SETTINGS)
    assert not made[0]._wanted
    with pytest.raises(ValueError, match="does not exist"):
        Llama(str(tmp_path / "none.gguf"), **SETTINGS)


# -- split models ----------------------------------------------------------------------------------


def test_all_shards_are_found(tmp_path, monkeypatch):
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in (*names, "m-00001-of-00002.gguf", "m.gguf"):
        (tmp_path / name).touch()
    assert shards(tmp_path / names[0]) == [tmp_path / name for name in names]
    assert shards(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    monkeypatch.chdir(tmp_path)
    assert shards(names[0]) == [tmp_path / name for name in names]
    os.unlink(names[1])
    assert shards(names[0]) == [tmp_path / name for name in names[::2]], (
        "a merged file may have kept its name"
    )


def gguf(path):
    """(count, bytes) of the keys, and (name, dims, type, bytes) of every tensor of a GGUF file."""
    with path.open("rb") as file:

        def read(form):
            return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))[0]

        sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

        def skip(kind):
            if kind == 8:
                file.seek(read("Q"), 1)
            elif kind == 9:
                inner, n = read("I"), read("Q")
                for _ in range(n):
                    skip(inner)
            else:
                file.seek(sizes[kind], 1)

        file.seek(8)
        n_tensors, n_keys = read("Q"), read("Q")
        start = file.tell()
        for _ in range(n_keys):
            file.seek(read("Q"), 1)
            skip(read("I"))
        end = file.tell()
        file.seek(start)
        keys, found = file.read(end - start), []
        for _ in range(n_tensors):
            name = file.read(read("Q"))
            dims = [read("Q") for _ in range(read("I"))]
            found.append((name, dims, read("I"), read("Q")))
        data = (file.tell() + 31) // 32 * 32
        ends = [*sorted(offset for *_, offset in found), path.stat().st_size - data]
        tensors = []
        for name, dims, kind, offset in found:
            file.seek(data + offset)
            tensors.append((name, dims, kind, file.read(ends[ends.index(offset) + 1] - offset)))
        return n_keys, keys, tensors


def write_shard(path, n_keys, keys, tensors, number, total):
    def key(name, kind, value):
        return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value

    keys += key(b"split.no", 2, struct.pack("<H", number)) + key(b"split.count", 2, struct.pack("<H", 2))
    keys += key(b"split.tensors.count", 5, struct.pack("<i", total))
    head, body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_keys + 3) + keys, b""
    for name, dims, kind, data in tensors:
        head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        head += b"".join(struct.pack("<Q", n) for n in dims) + struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)


@pytest.fixture
def split(tiny_model, tmp_path):
    """`split(seed)`: the first of two shards, which has no tensors (gguf-split --no-tensor-first-split), in
    the layout of a Hugging Face cache: links to blobs."""

    def make(seed):
        folder = tmp_path / f"snapshots-{seed}"
        folder.mkdir()
        n_keys, keys, tensors = gguf(tiny_model("qwen35", seed=seed))
        for i in (1, 2):
            blob = tmp_path / f"blob-{seed}-{i}"
            write_shard(blob, n_keys, keys, tensors if i == 2 else [], i - 1, len(tensors))
            (folder / f"m-0000{i}-of-00002.gguf").symlink_to(f"../{blob.name}")
        return folder / "m-00001-of-00002.gguf"

    return make


@pytest.mark.parametrize("disk", [False, True])
def test_every_shard_counts(split, tmp_path, disk):
    paths = [split(0), split(1)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    shared = PromptCache(1 << 28)
    for path in paths:
        cache = PromptCache(1 << 28, tmp_path / "disk") if disk else shared
        llm = Llama(str(path), prompt_cache=cache, **SETTINGS)
        assert take(llm, PROMPT) == stock(path, PROMPT)
        assert llm.last_request.cached == 0
        llm.prompt_cache.close()
    assert stock(paths[0], PROMPT) != stock(paths[1], PROMPT), "or the test proves nothing"


def test_a_shard_of_no_bytes_is_refused_by_the_library(split):
    path = split(0)
    second = path.with_name("m-00002-of-00002.gguf")
    second.unlink()
    second.touch()
    with pytest.raises(ValueError, match="Failed to load"):
        Llama(str(path), **SETTINGS)


# -- what has no name ------------------------------------------------------------------------------
