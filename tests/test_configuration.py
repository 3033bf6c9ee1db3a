"""What `configure` and the environment say, and which of them counts."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import llamahybrid
from llamahybrid import ConfigurationError, PromptCache, configuration, configure
from llamahybrid.configuration import (
    Configuration,
    Disk,
    cache_for,
    current,
    default_folder,
    own_cache,
    patience,
    shared_cache,
)

Opener = Callable[..., Any]
NAMES = ("LLAMAHYBRID_RAM", "LLAMAHYBRID_DISK", "LLAMAHYBRID_PARALLEL")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    monkeypatch.undo()
    configure(ram=None, disk=None, parallel=None)


@pytest.mark.parametrize(
    ("said", "n_bytes"),
    [
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5 TiB", 3 << 39),
        ("512mib", 512 << 20),
        ("1048576", 1 << 20),
        (1 << 20, 1 << 20),
        ("0", 0),
        (0, 0),
        ("off", 0),
        (" Off ", 0),
    ],
)
def test_sizes(said: Any, n_bytes: int, nothing_said: pytest.MonkeyPatch) -> None:
    assert configure(ram=said).ram == n_bytes
    configure(ram=None)
    nothing_said.setenv("LLAMAHYBRID_RAM", str(said))
    assert current().ram == n_bytes


@pytest.mark.parametrize(
    "said",
    [
        "lots",
        "2 GiB please",
        "-1",
        "GiB",
        "1e9",
        "0x10",
        "2",
        2,
        "1KiB",
        "0.5",
        -5,
        True,
        1.5,
        "nan",
        "1,5GiB",
    ],
)
def test_what_is_no_size_is_refused(said: Any, nothing_said: pytest.MonkeyPatch) -> None:
    configure(ram="64MiB")
    with pytest.raises(ConfigurationError, match="ram=") as caught:
        configure(ram=said)
    assert "2GiB" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert current().ram == 64 << 20
    configure(ram=None)
    if isinstance(said, str):
        nothing_said.setenv("LLAMAHYBRID_RAM", said)
        with pytest.raises(ConfigurationError, match="LLAMAHYBRID_RAM"):
            current()


@given(st.text(alphabet="0123456789.,-+ekmgtib ٣"))
def test_any_text_is_a_size_or_refused_as_such(text: str) -> None:
    try:
        found = configuration._size(text, "said")
    except ConfigurationError:
        return
    assert found == 0 or found >= 1 << 20


def test_the_disk_is_a_folder_a_size_or_nothing(tmp_path: Path) -> None:
    assert configure(disk=tmp_path).disk == Disk(tmp_path)
    assert configure(disk=str(tmp_path)).disk == Disk(tmp_path)
    assert configure(disk=f"{tmp_path}:20GiB").disk == Disk(tmp_path, 20 << 30)
    assert configure(disk="~/chats").disk == Disk(Path("~/chats").expanduser())
    assert configure(disk="./chats").disk == Disk(Path.cwd() / "chats")
    assert configure(disk="20GiB").disk == Disk(default_folder(), 20 << 30)
    assert configure(disk=1 << 30).disk == Disk(default_folder(), 1 << 30)
    assert configure(disk=True).disk == configure(disk="on").disk == Disk(default_folder())
    for off in (0, False, "0", "off"):
        assert configure(disk=off).disk is False
    nobody = "~nobody-of-this-name/chats"
    for nonsense in ("chats", "20 buckets", -1, 1.5, "/tmp/x:0", "3", nobody, f"{nobody}:2GiB", Path(nobody)):
        with pytest.raises(ConfigurationError, match="disk="):
            configure(disk=nonsense)  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["~nobody-of-that-name/chats", "~nobody-of-that-name/chats:20GiB"])
def test_a_folder_in_a_home_that_nobody_has_is_refused(folder: str, nothing_said: pytest.MonkeyPatch) -> None:
    for named in (folder, Path(folder)):
        with pytest.raises(ConfigurationError, match="disk="):
            configure(disk=named)
    nothing_said.setenv("LLAMAHYBRID_DISK", folder)
    with pytest.raises(ConfigurationError, match="LLAMAHYBRID_DISK"):
        cache_for(None)


def test_the_number_of_requests_at_once() -> None:
    assert configure(parallel="4").parallel == 4
    for nonsense in (0, -1, "many", "", 1.5, True, "2GiB", "٣", "9" * 5000):
        with pytest.raises(ConfigurationError, match="1 or more"):
            configure(parallel=nonsense)  # type: ignore[arg-type]
    assert current().parallel == 4


def test_configure_goes_before_the_environment_and_none_takes_it_back(
    nothing_said: pytest.MonkeyPatch,
) -> None:
    assert current() == Configuration()
    for name, value in zip(NAMES, ("64MiB", "off", "3"), strict=True):
        nothing_said.setenv(name, value)
    assert current() == Configuration(64 << 20, False, 3)
    assert configure(parallel=2) == Configuration(64 << 20, False, 2)
    assert configure(ram="128MiB") == Configuration(128 << 20, False, 2)
    assert configure(ram=None, parallel=None) == Configuration(64 << 20, False, 3)
    nothing_said.setenv("LLAMAHYBRID_RAM", "")
    assert current().ram is None


def test_a_nonsense_in_the_environment_is_told_and_changes_nothing(nothing_said: pytest.MonkeyPatch) -> None:
    nothing_said.setenv("LLAMAHYBRID_DISK", "some")
    with pytest.raises(ConfigurationError, match="LLAMAHYBRID_DISK=some"):
        configure(ram="64MiB")
    nothing_said.delenv("LLAMAHYBRID_DISK")
    assert current().ram is None


@pytest.mark.parametrize("disk", ["~nobody-of-that-name/x", Path("~nobody-of-that-name"), "2GiB", True, "on"])
def test_a_home_that_is_not_there_is_told(nothing_said: pytest.MonkeyPatch, disk: Any) -> None:
    nothing_said.setenv("LLAMAHYBRID_CACHE_DIR", "~nobody-of-that-name")
    with pytest.raises(ConfigurationError, match=r"disk=.*nobody of that name has a home folder"):
        configure(disk=disk)


def test_what_is_measured_gets_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_RAM", "16MiB")
    monkeypatch.setenv("LLAMAHYBRID_DISK", str(tmp_path / "chats"))
    first, second = own_cache(), own_cache()
    assert isinstance(first, PromptCache)
    assert isinstance(second, PromptCache)
    assert first is not second
    assert first is not shared_cache()
    assert (first.ram_bytes, first.leaves_process) == (16 << 20, False)
    kept = own_cache(on_disk=True)
    assert isinstance(kept, PromptCache)
    assert kept.leaves_process
    kept.close()
    monkeypatch.setenv("LLAMAHYBRID_RAM", "0")
    assert own_cache(on_disk=True) is False


def test_one_cache_for_the_process_until_something_else_is_said(tmp_path: Path) -> None:
    assert cache_for(None) is not cache_for(None)
    configure(ram="64MiB", disk=f"{tmp_path}:32MiB")
    cache = cache_for(None)
    assert cache is cache_for(None) is cache_for(True)
    assert isinstance(cache, PromptCache)
    assert cache.ram_bytes == 64 << 20
    assert cache.disk is not None
    configure(parallel=3)
    assert cache_for(None) is cache
    own = PromptCache(ram_bytes=1 << 20)
    assert cache_for(own) is own
    assert cache_for(False) is None
    configure(ram=0)
    assert cache_for(None) is None
    asked_for = cache_for(True)
    assert asked_for is not None
    assert asked_for is not cache
    configure(ram=None, disk=tmp_path)
    on_disk = cache_for(None)
    assert on_disk is not None
    assert on_disk is not cache
    assert on_disk.disk is not None
    cache.close(), on_disk.close()


@pytest.mark.parametrize("cls", [llamahybrid.Llama, llama_cpp.Llama])
def test_argument_then_install_then_configure_then_environment_then_built_in(
    open_model: Opener, nothing_said: pytest.MonkeyPatch, cls: Any
) -> None:
    """`Llama` by its own name has the same order, without what `install` was given."""

    def seen(**arguments: Any) -> tuple[int, int]:
        llm = open_model(cls=cls, **arguments)
        found = llm.prompt_cache.ram_bytes if llm.prompt_cache else 0, len(llm.slots.all)
        llm.close()
        return found

    by_name = cls is llamahybrid.Llama
    llamahybrid.install()
    try:
        built_in = PromptCache().ram_bytes, 1
        assert seen() == built_in
        nothing_said.setenv("LLAMAHYBRID_RAM", "64MiB")
        nothing_said.setenv("LLAMAHYBRID_PARALLEL", "2")
        assert seen() == (64 << 20, 2)
        configure(ram="32MiB", parallel=3)
        assert seen() == (32 << 20, 3)
        cache = PromptCache(ram_bytes=16 << 20)
        llamahybrid.install(prompt_cache=cache, n_parallel=4)
        assert seen() == ((32 << 20, 3) if by_name else (16 << 20, 4))
        assert seen(prompt_cache=PromptCache(ram_bytes=8 << 20), n_parallel=1) == (8 << 20, 1)
        assert seen(prompt_cache=False, n_parallel=1) == (0, 1)
        configure(ram="off")
        llamahybrid.install(n_parallel=4)
        assert seen() == (0, 1)
        assert seen(prompt_cache=True) == (built_in[0], 3 if by_name else 4)
    finally:
        llamahybrid.uninstall()


def test_two_models_share_what_was_configured(open_model: Opener) -> None:
    """A model that is opened anew finds what was kept, as where a server changes models."""
    configure(ram="64MiB")
    first = open_model()
    prompt = list(range(40, 100))
    stream = first.generate(prompt, temp=0.0)
    expected = [next(stream) for _ in range(4)]
    stream.close()
    second = open_model()
    assert second.prompt_cache is first.prompt_cache
    stream = second.generate(prompt, temp=0.0)
    assert [next(stream) for _ in range(4)] == expected
    stream.close()


def test_a_wish_for_slots_does_not_make_an_embedding_model_fail(
    open_model: Opener, nothing_said: pytest.MonkeyPatch
) -> None:
    nothing_said.setenv("LLAMAHYBRID_PARALLEL", "4")
    for options in ({"embedding": True}, {"vocab_only": True}, {"n_batch": 3}):
        assert len(open_model(**options).slots.all) == 1
    with pytest.raises(ValueError, match="prompt cache only"):
        open_model(embedding=True, n_parallel=4)


def test_a_wish_for_slots_takes_no_draft_model_away(
    open_model: Opener, nothing_said: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one slot it is asked, of several it would not be; who gives both means it so."""
    nothing_said.setenv("LLAMAHYBRID_PARALLEL", "4")
    draft = LlamaPromptLookupDecoding()
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        assert len(open_model(draft_model=draft).slots.all) == 1
    assert "draft_model" in caplog.text
    assert len(open_model(draft_model=draft, n_parallel=2).slots.all) == 2


def test_nonsense_in_the_environment_is_told_where_a_model_is_opened(
    open_model: Opener, nothing_said: pytest.MonkeyPatch
) -> None:
    nothing_said.setenv("LLAMAHYBRID_PARALLEL", "many")
    with pytest.raises(ConfigurationError, match="LLAMAHYBRID_PARALLEL=many"):
        open_model()
    assert open_model(prompt_cache=False, n_parallel=1)


@pytest.mark.parametrize("given", ["~/chats", "x", 0, 1, 5, Path("chats"), {}])
def test_what_is_no_prompt_cache_is_refused(open_model: Opener, given: Any) -> None:
    """A folder, say, would pass for True, and nothing would ever lie there."""
    for more in ({}, {"embedding": True}, {"vocab_only": True}):
        with pytest.raises(TypeError, match="prompt_cache="):
            open_model(prompt_cache=given, **more)


def test_how_long_a_request_may_wait() -> None:
    assert patience(None) is patience(True) is patience(float("inf")) is patience(10**12) is True
    assert patience(False) is False
    assert (patience(0), patience(2.5)) == (0, 2.5)
    for nonsense in ("x", "5", [1]):
        with pytest.raises(TypeError, match="wait="):
            patience(nonsense)  # type: ignore[arg-type]
    for nonsense in (-1, float("nan")):
        with pytest.raises(ValueError, match="wait="):
            patience(nonsense)


def test_a_model_is_told_what_it_is_given(open_model: Opener) -> None:
    with pytest.raises(TypeError, match="wait="):
        open_model(wait="x")
    assert open_model(wait=None).requests.gate.wait is True


def test_the_folder_for_conversations_is_moved_with_all_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path / "prompts"
    assert configure(disk=True).disk == Disk(tmp_path / "prompts")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_a_process_that_is_forked_while_a_cache_is_opened_waits_for_nobody() -> None:
    """Opening one reads a folder, or waits for a server: a pool of workers may be forked meanwhile."""
    with configuration._lock:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(20)
                configure(ram="64MiB")
                os._exit(0 if cache_for(None) is cache_for(None) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
