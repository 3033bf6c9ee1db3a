"""The version of llama_cpp, without importing it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from llamahybrid.engine import bindings


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('__version__ = "9.8.7"\n', "9.8.7"),
        ("__version__ = '9.8.7'", "9.8.7"),
        ('__version__ = "0.3.36"', "0.3.36+cu124"),
        ("from .llama import *", "0.3.36+cu124"),
        (None, "0.3.36+cu124"),
    ],
)
def test_importable_llama_cpp_determines_the_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None, version: str
) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    if said is not None:
        (package / "__init__.py").write_text(said)
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.36+cu124")
    monkeypatch.setattr(bindings, "stock", lambda: package / "lib")
    assert bindings.version() == version
    assert bindings.version("llamahybrid") == "0.3.36+cu124"
