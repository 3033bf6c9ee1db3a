"""What the engine that this process runs is: the libraries that are mapped, by their content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import llama_cpp  # noqa: F401 - loads the engine
import pytest

from llamahybrid.engine import bindings, installed, loaded


def test_the_engine_is_libllama_and_the_backends_that_are_loaded() -> None:
    names = {path.name.split(".")[0] for path in loaded.libraries()}
    assert {"libllama", "libggml", "libggml-base"} <= names
    assert any(name.startswith("libggml-cpu") for name in names)
    assert all(name.startswith(("libllama", "libggml")) for name in names)
    assert loaded.engine_digest() == loaded.engine_digest()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux says what is loaded")
def test_a_library_that_was_replaced_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = list(loaded._mapped())
    monkeypatch.setattr(loaded, "_mapped", lambda: [*mapped, "/gone/libggml-cpu.so (deleted)"])
    with pytest.raises(OSError, match=r"/gone/libggml-cpu\.so was replaced since it was loaded"):
        loaded.libraries()
    with pytest.raises(OSError, match="was replaced"):
        loaded.engine_digest()


def test_the_name_is_of_all_contents_and_of_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = loaded.engine_digest()
    copies = [Path(shutil.copy(path, tmp_path)) for path in loaded.libraries()]
    monkeypatch.setattr(loaded, "libraries", lambda: copies)
    assert loaded.engine_digest() == before
    with copies[-1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert loaded.engine_digest() != before
    monkeypatch.setattr(loaded, "libraries", lambda: copies[:-1])
    assert loaded.engine_digest() != before
    monkeypatch.setattr(loaded, "libraries", list)
    with pytest.raises(OSError, match="cannot be found"):
        loaded.engine_digest()


def test_its_patches_are_those_of_an_engine_that_was_built_here(
    built: Callable[..., installed.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built(patches={"0001-a.patch": "0", "0030-b.patch": "0"})
    monkeypatch.setattr(loaded, "loaded_from", lambda: engine.libraries.resolve())
    library = engine.libraries / "own"
    library.write_text("code")
    replace(engine, files=installed.contents(engine.libraries)).write()
    assert loaded.patches() == {"0001", "0030"}
    library.write_text("edoc")
    assert not loaded.patches()
    monkeypatch.setattr(loaded, "loaded_from", lambda: None)
    assert not loaded.patches()
    stock = bindings.stock()
    monkeypatch.setattr(loaded, "loaded_from", lambda: stock)
    assert not loaded.patches()
