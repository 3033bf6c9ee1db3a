"""Building an engine: what goes into it, and what an end of any kind leaves behind.

A stand-in for the build makes the wheel; its libllama is a copy of a real library, since it is loaded.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from llamahybrid.engine import activation, build, installed, patched, sdist, series
from llamahybrid.errors import EngineError


class Build:
    """Stands in for `build.run`: a wheel with the stock libraries, or an end."""

    def __init__(self) -> None:
        self.trees: list[dict[str, str]] = []
        self.end: BaseException | None = None

    def run(self, source: Path, out: Path, progress: build.Progress, log: Path) -> None:
        self.trees.append(
            {str(f.relative_to(source)): f.read_text() for f in source.rglob("*") if f.is_file()}
        )
        out.mkdir()
        (out / "half.o").touch()
        if self.end:
            raise self.end
        stock = activation.stock()
        assert stock is not None
        with zipfile.ZipFile(out / "x.whl", "w") as wheel:
            wheel.writestr("llama_cpp/__init__.py", "")
            for library in stock.iterdir():
                wheel.write(library, f"llama_cpp/lib/{library.name}")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """The cache is empty, the sdist is two files, the series patches one of them."""
    fake = Build()
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "series").write_text("0001-b.patch\n")
    (patches / "0001-b.patch").write_text(
        "--- a/include/llama.h\n+++ b/include/llama.h\n@@ -1 +1 @@\n-a\n+b\n"
    )
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(series, "folder", lambda: patches)
    monkeypatch.setattr(sdist, "unpack", unpack)
    monkeypatch.setattr(build, "run", fake.run)
    return fake


def unpack(dest: Path) -> Path:
    write(dest / "llama_cpp" / "__init__.py", f'__version__ = "{activation.version()}"\n')
    write(dest / "vendor/llama.cpp/include/llama.h", "a\n")
    return dest


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)


def make(force: bool = False, source: Path | None = None) -> installed.Engine:
    return patched.make(lambda *step: None, force=force, source=source)


def test_the_series_is_applied_and_the_engine_matches(fake: Build) -> None:
    engine = make()
    assert fake.trees[0]["vendor/llama.cpp/include/llama.h"] == "b\n"
    assert engine.mismatch(activation.version()) == ""
    assert installed.engines() == [engine]
    assert "llama_n_rs_seq" in engine.symbols


def test_it_is_built_once_unless_forced(fake: Build) -> None:
    assert make() == make()
    assert len(fake.trees) == 1
    make(force=True)
    assert len(fake.trees) == 2
    assert len(list(installed.home().iterdir())) == 1


def test_other_patches_and_options_make_another_engine(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make()
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=on")
    assert make().folder != old.folder
    (series.folder() / "0001-b.patch").write_text("")
    assert "patches have changed" in old.mismatch(activation.version())


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EngineError("no compiler")])
def test_an_end_leaves_what_was_there(fake: Build, end: BaseException) -> None:
    engine = make()
    fake.end = end
    with pytest.raises(type(end)):
        make(force=True)
    assert installed.engines() == [engine]
    assert list(installed.home().iterdir()) == [engine.folder]


def test_a_patch_that_does_not_apply_is_named(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    (series.folder() / "0001-b.patch").write_text(
        "--- a/include/llama.h\n+++ b/include/llama.h\n@@ -1 +1 @@\n-x\n+b\n"
    )
    with pytest.raises(EngineError, match=r"0001-b\.patch does not apply"):
        make()
    assert not list(installed.home().iterdir())


def test_a_checkout_is_built_as_it_is_and_not_taken_by_itself(fake: Build, tmp_path: Path) -> None:
    write(tmp_path / "mine/include/llama.h", "mine\n")
    engine = make(source=tmp_path / "mine")
    assert fake.trees[0]["vendor/llama.cpp/include/llama.h"] == "mine\n"
    assert f"LLAMAHYBRID_ENGINE={engine.libraries}" in engine.mismatch(activation.version())


def test_what_is_no_checkout_is_refused(fake: Build, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="checkout of neither"):
        make(source=tmp_path)


def test_the_real_series_is_found() -> None:
    assert list(series.patches()) == (series.folder() / "series").read_text().split()
