"""Engines as `engine build` makes them, without a build."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import pytest

from llamahybrid.engine import bindings, choice, installed, sdist, series, storage
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.recipe import Recipe

Build: TypeAlias = Callable[..., Engine]
Wheel: TypeAlias = Callable[..., Path]
OURS = ("LLAMAHYBRID_ENGINE", "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "CMAKE_ARGS")


def mismatch(engine: Engine) -> str:
    """The reason why an engine does not replace stock in this test."""
    return choice.mismatch(engine, choice.InstalledBindings.here())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no requested engine."""
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def built(cache: Path) -> Build:
    """`built(name, backends, real=False, **changes)`: an engine; its libraries are empty, or stock's."""

    def build(
        name: str = "one", backends: Iterable[str] = ("cpu",), real: bool = False, **changes: object
    ) -> Engine:
        libraries = storage.folder(installed.home() / name / "lib")
        suffix = installed.SUFFIXES[0]
        if real:
            stock = bindings.stock()
            assert stock is not None
            known: dict[bytes, str] = {}
            for file in sorted(stock.iterdir()):
                content = file.read_bytes()
                twin = known.setdefault(content, file.name)
                if twin == file.name:
                    (libraries / twin).write_bytes(content)
                else:
                    (libraries / file.name).symlink_to(twin)
        else:
            for library in ("llama", "mtmd", *(f"ggml-{backend}" for backend in backends)):
                (libraries / f"lib{library}{suffix}").touch()
        facts = {
            "version": bindings.version(),
            "recipe": Recipe.here(),
            "patches": series.patches(sdist.PIN.version, series.REUSE),
            "source": "",
            "built": "2026-01-01T00:00:00+00:00",
            "files": installed.contents(libraries),
        }
        engine = Engine(folder=installed.home() / name, **{**facts, **changes})  # type: ignore[arg-type]
        engine.write()
        for path in engine.folder.rglob("*"):  # as a build does, under any umask
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o022)
        return engine

    return build


@pytest.fixture
def wheel_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """`wheel_with("cpu", "cuda")`: the installed llama-cpp-python has these backends."""

    def install(*backends: str) -> Path:
        folder = tmp_path / "site" / "llama_cpp" / "lib"
        folder.mkdir(parents=True)
        for name in ("llama", "mtmd", "ggml", "ggml-base", *(f"ggml-{backend}" for backend in backends)):
            (folder / f"lib{name}{installed.SUFFIXES[0]}").touch()
        monkeypatch.setattr(bindings, "stock", lambda: folder)
        return folder

    return install
