"""The pinned sdist and the wheel built from it: hashes, atomic steps, and messages that say what to do.

A small archive stands in for the real one, and a stand-in for pip hands it over.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamahybrid.engine import __main__ as command
from llamahybrid.engine import build, process, recipe, sdist
from llamahybrid.engine.recipe import Recipe
from llamahybrid.errors import EngineError

FILES = {"pyproject.toml": b"[project]\n", "vendor/llama.cpp/models/a.gguf": b"GGUF" * 100}


class Index:
    """What `pip download` would give, and how often it was asked."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked = 0
        self.failure = ""

    def run(self, command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.asked += 1
        if self.failure:
            return subprocess.CompletedProcess(command, 1, "", self.failure)
        assert "--require-hashes" in command
        assert sdist.PIN.sha256 in Path(command[-1]).read_text()
        Path(command[command.index("--dest") + 1], sdist.PIN.archive).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in FILES.items():
            info = tarfile.TarInfo(f"llama_cpp_python-9.9.9/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    index = Index(packed.getvalue())
    monkeypatch.setattr(sdist, "PIN", sdist.Pin("9.9.9", hashlib.sha256(index.content).hexdigest()))
    monkeypatch.setattr(subprocess, "run", index.run)
    monkeypatch.setattr(recipe, "_identity", lambda command: command)
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    return index


def litter(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".part-")]


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    assert sdist.cache_dir() == tmp_path
    monkeypatch.delenv("LLAMAHYBRID_CACHE_DIR")
    assert sdist.cache_dir().name == "llamahybrid"


def test_it_is_fetched_once(index: Index) -> None:
    first = sdist.fetch()
    assert first.read_bytes() == index.content
    assert sdist.fetch() == first
    assert index.asked == 1
    assert not litter(sdist.cache_dir())


def test_a_damaged_copy_is_fetched_again(index: Index) -> None:
    sdist.fetch().write_bytes(index.content[:-1])
    assert sdist.fetch().read_bytes() == index.content
    assert index.asked == 2


def test_another_hash_is_refused_and_not_kept(index: Index) -> None:
    index.content += b"!"
    with pytest.raises(EngineError, match="pip config list"):
        sdist.fetch()
    assert not [path for path in sdist.cache_dir().rglob("*") if path.is_file()]


def test_what_pip_said_is_passed_on(index: Index) -> None:
    index.failure = "No matching distribution found"
    with pytest.raises(EngineError, match="No matching distribution"):
        sdist.fetch()
    assert not litter(sdist.cache_dir())


def test_a_member_is_taken_out_once(index: Index) -> None:
    path = sdist.member("vendor/llama.cpp/models/a.gguf")
    assert path.read_bytes() == FILES["vendor/llama.cpp/models/a.gguf"]
    index.failure = "offline"
    sdist.fetch().unlink()
    assert sdist.member("vendor/llama.cpp/models/a.gguf") == path


@pytest.mark.parametrize(
    "name", ["models/none.gguf", "../llama_cpp_python-9.9.9.tar.gz", "/etc/hostname", "vendor"]
)
def test_what_is_no_member_is_an_error(index: Index, name: str) -> None:
    sdist.member("pyproject.toml")  # the archive itself lies where the second one points to
    with pytest.raises(EngineError, match=r"9\.9\.9"):
        sdist.member(name)


def test_the_whole_tree_without_its_top_folder(index: Index, tmp_path: Path) -> None:
    tree = sdist.unpack(tmp_path / "tree")
    assert {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()} == set(FILES)
    (tmp_path / "empty").mkdir()
    assert sdist.unpack(tmp_path / "empty") == tmp_path / "empty"
    for taken in (tree, tree / "pyproject.toml"):
        with pytest.raises(EngineError, match="in the way"):
            sdist.unpack(taken)
    assert not litter(tmp_path)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("  [3/120] Building CXX object src/a.cpp.o\n", (3, 120, "Building CXX object src/a.cpp.o")),
        ("[ 42%] Built target ggml\n", (42, 100, "Built target ggml")),
        ("  *** Configuring CMake...\n", (0, 0, "Configuring CMake")),
        ("-- Detecting CXX compiler features\n", None),
    ],
)
def test_build_output_tells_progress(line: str, step: tuple[int, int, str] | None) -> None:
    assert process.read_step(line) == step


def pip_that(monkeypatch: pytest.MonkeyPatch, script: str) -> list[subprocess.Popen[str]]:
    """Put a short Python script in the place of `pip wheel`; its argument is the wheel folder."""
    start, started = subprocess.Popen, []

    def popen(command: list[str], **options: object) -> subprocess.Popen[str]:
        out = command[command.index("--wheel-dir") + 1]
        started.append(start([sys.executable, "-c", script, out], **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


BUILDS = """
import pathlib, sys
sys.stdout.buffer.write(b"no \\xff text\\n")
print("  [1/2] one", flush=True)
print("  [2/2] two", flush=True)
out = pathlib.Path(sys.argv[1])
out.mkdir()
(out / "llama_cpp_python-9.9.9-py3-none-any.whl").write_text("wheel")
"""


def test_the_wheel_is_built_once_for_each_set_of_options(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, BUILDS)
    steps: list[tuple[int, int, str]] = []
    plain = build.wheel(lambda *step: steps.append(step))
    assert plain.read_text() == "wheel"
    assert steps == [(1, 2, "one"), (2, 2, "two")]
    assert build.wheel(lambda *step: steps.append(step)) == plain
    assert len(steps) == 2
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert build.wheel(lambda *step: None) != plain
    assert not litter(sdist.cache_dir())
    assert not list(sdist.cache_dir().rglob("*.log"))


def test_a_failed_build_names_its_log_and_leaves_nothing(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, "import os, sys; print('no compiler', os.environ['TMPDIR']); sys.exit(1)")
    with pytest.raises(EngineError, match="no compiler") as caught:
        build.wheel(lambda *step: None)
    (log,) = (sdist.cache_dir() / "wheels").iterdir()
    assert str(log) in str(caught.value)
    said, temporary = log.read_text().strip().rsplit(maxsplit=1)
    assert said == "no compiler"
    assert sdist.cache_dir() in Path(temporary).parents, "what it leaves behind would stay"


@pytest.mark.parametrize("script", ["", BUILDS + "sys.exit(3)"])
def test_success_takes_both_a_wheel_and_a_clean_exit(
    index: Index, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    pip_that(monkeypatch, script)
    with pytest.raises(EngineError, match="did not build"):
        build.wheel(lambda *step: None)
    assert not list(sdist.cache_dir().rglob("*.whl"))


def test_whoever_finishes_the_same_build_second_takes_the_firsts(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = sdist.cache_dir() / "wheels" / Recipe.here().key

    def first(*_: object) -> None:
        home.mkdir(exist_ok=True)
        (home / "first.whl").touch()

    pip_that(monkeypatch, BUILDS)
    assert build.wheel(first) == home / "first.whl"


def test_a_wheel_that_cannot_be_put_in_its_place_is_an_error(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    sdist.fetch()
    pip_that(monkeypatch, BUILDS)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EngineError, match="disk full"):
        build.wheel(lambda *step: None)


def test_an_interrupted_build_is_ended_and_leaves_no_wheel(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pip_that(monkeypatch, BUILDS + "import time; time.sleep(60)")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.wheel(interrupt)
    assert not list((sdist.cache_dir() / "wheels").iterdir()), "no log either"
    assert [process.poll() for process in started] == [-signal.SIGTERM]
    process.end(started[0])  # once more does no harm


def test_a_build_that_does_not_end_when_told_to_is_ended_by_force(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    started = pip_that(monkeypatch, script + BUILDS + "time.sleep(60)")
    monkeypatch.setattr(process, "_PATIENCE", 0.1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.wheel(interrupt)
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_a_disk_that_the_compiler_finds_full_is_named(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "print('fatal error: writing to x.o: No space left on device')\n" + "print('more')\n" * 30
    pip_that(monkeypatch, says + "raise SystemExit(1)")
    with pytest.raises(EngineError, match="the disk is full"):
        build.wheel(lambda *step: None)


def test_where_the_log_cannot_be_written_nothing_is_started(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pip_that(monkeypatch, BUILDS)
    (sdist.cache_dir() / "wheels" / f"{Recipe.here().key}.log").mkdir(parents=True)
    with pytest.raises(EngineError, match="LLAMAHYBRID_CACHE_DIR"):
        build.wheel(lambda *step: None)
    assert not started


def test_a_wheel_that_others_can_write_is_not_installed(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, BUILDS)
    wheel = build.wheel(lambda *step: None)
    wheel.chmod(0o666)
    with pytest.raises(EngineError, match="can be written by others"):
        build.wheel(lambda *step: None)


def test_a_folder_without_its_wheel_is_built_anew(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, BUILDS)
    build.wheel(lambda *step: None).unlink()
    assert build.wheel(lambda *step: None).read_text() == "wheel"


@pytest.mark.parametrize("what", ["sdist", "wheel"])
def test_the_command_prints_the_path_alone(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    pip_that(monkeypatch, BUILDS)
    monkeypatch.setattr(sys, "argv", ["engine", what])
    assert command.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert Path(line).is_file()


def test_the_command_shows_progress_as_plain_lines_in_a_log(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip_that(monkeypatch, BUILDS)
    monkeypatch.setattr(sys, "argv", ["engine", "wheel"])
    command.main()
    assert capsys.readouterr().err.splitlines() == [
        "llama-cpp-python: 50 % compiled",
        "llama-cpp-python: 100 % compiled",
    ]


def test_the_command_fails_with_one_message(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index.failure = "offline"
    monkeypatch.setattr(sys, "argv", ["engine", "sdist"])
    assert command.main() == 1
    assert capsys.readouterr().err.startswith("error: pip could not fetch")
