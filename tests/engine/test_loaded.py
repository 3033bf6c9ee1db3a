"""Identity of the loaded engine: the content of the mapped libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import llama_cpp  # noqa: F401 - loads the engine
import pytest

from llamahybrid.engine import bindings, installed, loaded


def test_engine_digest_depends_on_contents_not_on_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_patches_are_those_of_an_undamaged_built_engine(
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


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux says what is loaded")
def test_replaced_library_has_no_digest(
    built: Callable[..., installed.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed.library(built(real=True).libraries, "llama")
    assert library is not None
    code = f"""
import os, shutil, llamahybrid, llama_cpp
from llamahybrid.engine import loaded
loaded.engine_digest()
os.replace(shutil.copy("{library.resolve()}", "{library.parent}/new"), "{library.resolve()}")
loaded.engine_digest()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "was replaced since it was loaded" in run.stderr.splitlines()[-1]
