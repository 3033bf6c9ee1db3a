"""Settings of `configure` and of the environment: what they accept, and which of them counts."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import llamahybrid
import llamahybrid.prompt_cache
from llamahybrid import ConfigurationError, PromptCache, configure
from llamahybrid.configuration import (
    Configuration,
    Disk,
    cache_for,
    current,
    default_folder,
    own_cache,
    wait_timeout,
)
from tests.conftest import EMBEDDING_ALONE

Opener = Callable[..., Any]
NAMES = ("LLAMAHYBRID_RAM", "LLAMAHYBRID_DISK", "LLAMAHYBRID_PARALLEL")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
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
def test_sizes_have_units(said: Any, n_bytes: int, no_settings: pytest.MonkeyPatch) -> None:
    assert configure(ram=said).ram == n_bytes
    configure(ram=None)
    no_settings.setenv("LLAMAHYBRID_RAM", str(said))
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
def test_values_that_are_no_size_are_refused(said: Any, no_settings: pytest.MonkeyPatch) -> None:
    configure(ram="64MiB")
    with pytest.raises(ConfigurationError, match="ram=") as caught:
        configure(ram=said)
    assert "2GiB" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert current().ram == 64 << 20
    configure(ram=None)
    if isinstance(said, str):
        no_settings.setenv("LLAMAHYBRID_RAM", said)
        with pytest.raises(ConfigurationError, match="LLAMAHYBRID_RAM"):
            current()


def test_disk_is_a_folder_a_size_or_off(tmp_path: Path) -> None:
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


def test_parallel_is_a_positive_number() -> None:
    assert configure(parallel="4").parallel == 4
    for nonsense in (0, -1, "many", "", 1.5, True, "2GiB", "٣", "9" * 5000):
        with pytest.raises(ConfigurationError, match="1 or more"):
            configure(parallel=nonsense)  # type: ignore[arg-type]
    assert current().parallel == 4


def test_configure_overrides_the_environment_and_none_resets_it(
    no_settings: pytest.MonkeyPatch,
) -> None:
    assert current() == Configuration()
    for name, value in zip(NAMES, ("64MiB", "off", "3"), strict=True):
        no_settings.setenv(name, value)
    assert current() == Configuration(64 << 20, False, 3)
    assert configure(parallel=2) == Configuration(64 << 20, False, 2)
    assert configure(ram="128MiB") == Configuration(128 << 20, False, 2)
    assert configure(ram=None, parallel=None) == Configuration(64 << 20, False, 3)
    no_settings.setenv("LLAMAHYBRID_RAM", "")
    assert current().ram is None


def test_wrong_environment_is_refused_and_changes_nothing(no_settings: pytest.MonkeyPatch) -> None:
    no_settings.setenv("LLAMAHYBRID_DISK", "some")
    with pytest.raises(ConfigurationError, match="LLAMAHYBRID_DISK=some"):
        configure(ram="64MiB")
    no_settings.delenv("LLAMAHYBRID_DISK")
    assert current().ram is None


@pytest.mark.parametrize("disk", ["~nobody-of-that-name/x", Path("~nobody-of-that-name"), "2GiB", True, "on"])
def test_missing_home_folder_is_refused(no_settings: pytest.MonkeyPatch, disk: Any) -> None:
    no_settings.setenv("LLAMAHYBRID_CACHE_DIR", "~nobody-of-that-name")
    with pytest.raises(ConfigurationError, match=r"disk=.* home (folder|directory)"):
        configure(disk=disk)


def test_measurements_get_a_cache_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_RAM", "16MiB")
    monkeypatch.setenv("LLAMAHYBRID_DISK", str(tmp_path / "chats"))
    cache = own_cache()
    assert isinstance(cache, PromptCache)
    assert (cache.ram_bytes, cache.leaves_process) == (16 << 20, True)
    assert cache_for(None) is not cache
    cache.close()
    monkeypatch.setenv("LLAMAHYBRID_RAM", "0")
    assert own_cache() is False


def test_models_share_one_cache_until_settings_change(tmp_path: Path) -> None:
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
def test_arguments_override_install_then_configure_then_environment(
    open_model: Opener, no_settings: pytest.MonkeyPatch, cls: Any
) -> None:
    """`Llama` by its own name has the same order, without what `install` was given."""

    def seen(**arguments: Any) -> tuple[int, int]:
        llm = open_model(cls=cls, **arguments)
        found = llm.prompt_cache.ram_bytes if llm.prompt_cache else 0, llm.n_parallel
        llm.close()
        return found

    by_name = cls is llamahybrid.Llama
    llamahybrid.install()
    try:
        built_in = PromptCache().ram_bytes, 1
        assert seen() == built_in
        no_settings.setenv("LLAMAHYBRID_RAM", "64MiB")
        no_settings.setenv("LLAMAHYBRID_PARALLEL", "2")
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


def test_configured_slots_do_not_make_an_embedding_model_fail(
    open_model: Opener, no_settings: pytest.MonkeyPatch
) -> None:
    no_settings.setenv("LLAMAHYBRID_PARALLEL", "4")
    for options in (EMBEDDING_ALONE, {"vocab_only": True}, {"n_batch": 3}):
        assert open_model(**options).n_parallel == 1
    with pytest.raises(ValueError, match="prompt cache only"):
        open_model(n_parallel=4, **EMBEDDING_ALONE)
    assert open_model(embedding=True).n_parallel == 4


def test_more_configured_slots_than_a_context_takes_are_one(
    open_model: Opener, no_settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_settings.setenv("LLAMAHYBRID_PARALLEL", "300")
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        assert open_model(n_batch=512).n_parallel == 1
    assert "n_parallel=300" in caplog.text


def test_configured_slots_keep_the_draft_model(
    open_model: Opener, no_settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_settings.setenv("LLAMAHYBRID_PARALLEL", "4")
    draft = LlamaPromptLookupDecoding()
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        assert open_model(draft_model=draft).n_parallel == 1
    assert "draft_model" in caplog.text
    assert open_model(draft_model=draft, n_parallel=2).n_parallel == 2


def test_opening_a_model_refuses_a_wrong_environment(
    open_model: Opener, no_settings: pytest.MonkeyPatch
) -> None:
    no_settings.setenv("LLAMAHYBRID_PARALLEL", "many")
    with pytest.raises(ConfigurationError, match="LLAMAHYBRID_PARALLEL=many"):
        open_model()
    assert open_model(prompt_cache=False, n_parallel=1, stock_logprobs=False)


@pytest.mark.parametrize("given", ["~/chats", "x", 0, 1, 5, Path("chats"), {}])
def test_prompt_cache_must_be_one(open_model: Opener, given: Any) -> None:
    """A folder, say, would pass for True, and nothing would be stored there."""
    for more in ({}, EMBEDDING_ALONE, {"vocab_only": True}):
        with pytest.raises(TypeError, match="prompt_cache="):
            open_model(prompt_cache=given, **more)


def test_wait_is_a_flag_or_seconds() -> None:
    assert (
        wait_timeout(None) is wait_timeout(True) is wait_timeout(float("inf")) is wait_timeout(10**12) is True
    )
    assert wait_timeout(False) is False
    assert (wait_timeout(0), wait_timeout(2.5)) == (0, 2.5)
    for nonsense in ("x", "5", [1]):
        with pytest.raises(TypeError, match="wait="):
            wait_timeout(nonsense)  # type: ignore[arg-type]
    for nonsense in (-1, float("nan")):
        with pytest.raises(ValueError, match="wait="):
            wait_timeout(nonsense)


@given(st.text(alphabet="0123456789.,-+ekmgtib ٣"))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        found = configure(ram=text).ram
    except ConfigurationError:
        return
    assert found is not None
    assert found == 0 or found >= 1 << 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_forked_process_opens_a_cache_while_its_parent_is_opening_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    class Slow(PromptCache):
        def __init__(self, *args: Any, **options: Any) -> None:
            if os.getpid() == parent:
                opening.set()
                go_on.wait(60)
            super().__init__(*args, **options)

    monkeypatch.setattr(llamahybrid.prompt_cache, "PromptCache", Slow)
    configure(ram="65MiB")
    opener = threading.Thread(target=cache_for, args=(None,))
    opener.start()
    try:
        assert opening.wait(60)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                os._exit(0 if cache_for(None) is cache_for(None) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go_on.set()
        opener.join()
