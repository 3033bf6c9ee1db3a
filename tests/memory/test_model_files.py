"""A model is what its files hold: every bit and every shard, wherever they lie and whenever they changed."""

import os
import shutil
import threading
import time

import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.engine import content
from llamahybrid.memory import model_files
from llamahybrid.memory.model_files import ModelFiles
from tests.conftest import SETTINGS, take

from .conftest import LONGER, PROMPT, named, overwritten, replaced, stock, wait_for_tick

pytestmark = pytest.mark.usefixtures("user_folder")


@pytest.fixture
def large(monkeypatch):
    """Any file is a large one, that the file system has known for long."""
    monkeypatch.setattr(content, "SMALL", 0)
    monkeypatch.setattr(model_files, "SMALL", 0)
    monkeypatch.setattr(content, "SETTLED_SECONDS", 0)


@pytest.fixture
def reads(monkeypatch):
    """Paths of models whose content was asked for."""
    found, digest = [], model_files.digest
    monkeypatch.setattr(model_files, "digest", lambda path, *rest: found.append(path) or digest(path, *rest))
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


def test_the_place_of_a_model_does_not_count(tiny_model, tmp_path, monkeypatch):
    path = tiny_model("qwen35")
    moved = tmp_path / "elsewhere.gguf"
    shutil.copy(path, moved)
    (tmp_path / "link.gguf").symlink_to(moved)
    monkeypatch.chdir(tmp_path)
    assert {named(path), named(moved), named("elsewhere.gguf"), named("./link.gguf")} == {named(path)}


def test_state_on_disk_is_named_by_content(tiny_model, tmp_path, large):
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
    wait_for_tick(path)
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
    signature = content.Signature(1, 1, 1000, time.time_ns() + 3600 * 10**9, 0)
    monkeypatch.setattr(content.Signature, "of", classmethod(lambda cls, p: signature))
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
    wait_for_tick(path)
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
    wait_for_tick(path)
    path.write_bytes(b"other weights")
    assert [files.edited(), files.edited()] == [mapped, False]
    assert (files.name == name) is not mapped


@pytest.mark.parametrize("change", [lambda path: path.chmod(0o400), lambda path: os.link(path, f"{path}-2")])
def test_a_change_of_no_byte_of_a_mapped_model_is_no_edit(tmp_path, change):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    files = ModelFiles(path, by_content=False)
    files.loaded(mapped=True)
    name, noted = files.name, content.Signature.of(path)
    wait_for_tick(path)
    change(path)
    assert content.Signature.of(path).ctime_ns != noted.ctime_ns
    assert not files.edited()
    assert files.name == name


# -- split models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by_content", [False, True])
def test_every_shard_counts(tmp_path, by_content):
    """In the layout of a Hugging Face cache: links to blobs."""
    made = []
    for seed in (0, 1):
        folder = tmp_path / f"snapshot-{seed}"
        folder.mkdir()
        for i in (1, 2):
            blob = tmp_path / f"blob-{seed}-{i}"
            blob.write_bytes(b"weights of one" if i == 1 or seed == 0 else b"other weights.")
            (folder / f"m-0000{i}-of-00002.gguf").symlink_to(f"../{blob.name}")
        made.append(ModelFiles(folder / "m-00001-of-00002.gguf", by_content=by_content))
    assert made[0].name != made[1].name
    assert made[0].content() != made[1].content()
