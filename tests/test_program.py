"""`llamahybrid run`: as Python would run it, but for one class."""

from __future__ import annotations

import os
import py_compile
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from tests.conftest import TinyModel

ROOT = Path(__file__).parents[1]
OURS = (sys.executable, "-m", "llamahybrid", "run")

SEEN = """
import atexit, json, sys, threading
def typed(x: int): ...
told = {
    "types": repr(typed.__annotations__),
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__,
    "main": sys.modules["__main__"].__dict__ is globals(), "spec": getattr(__spec__, "name", None),
    "hook": sys.excepthook is sys.__excepthook__, "loaded": "llama_cpp" in sys.modules, "near": None,
}
try:
    import near
    told["near"] = near.__file__
except ImportError:
    pass
print(json.dumps(told))
def last():
    print("last", sys.argv[1:], __name__, sys.modules["__main__"].__dict__ is globals())
atexit.register(last)
threading.Thread(target=lambda: (threading.main_thread().join(), last())).start()
end = sys.argv[-1]
"""
ENDS = {
    "falls": "",
    "exits": "if end == 'exits': sys.exit(7)\n",
    "raises": "if end == 'raises': raise EOFError('no more')\n",
    "interrupted": "if end == 'interrupted': raise KeyboardInterrupt\n",
    "hooked": "if end == 'hooked': sys.excepthook = lambda *a: print('mine', a[1]); 1 / 0\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    (place / "package").mkdir(parents=True)
    (place / "package" / "__init__.py").touch()
    program = SEEN + "".join(ENDS.values())
    for name in ("script.py", "module.py", "package/__main__.py"):
        (place / name).write_text(program)
    (place / "near.py").touch()
    (place / "nothing").mkdir()
    (place / "nothing" / "__init__.py").touch()
    (place / "wrong.py").write_text("def\n")
    (place / "wants").mkdir()
    (place / "wants" / "__init__.py").write_text("import something_that_is_not_there\n")
    (place / "wants" / "inside.py").touch()
    with zipfile.ZipFile(place / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", program)
    return place


def run(command: tuple[str, ...], cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **env},
    )


@pytest.mark.parametrize("end", ENDS)
def test_script_sees_and_ends_as_under_python(folder: Path, end: str) -> None:
    both = [
        run(c, folder.parent, "place/script.py", "--m", "-m", "x", end) for c in ((sys.executable,), OURS)
    ]
    plain, ours = both
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert '"loaded": false' in ours.stdout
    assert "last" in ours.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "module", "-m", "exits"),
        ("-m", "package", "falls"),
        ("package", "exits"),
        ("archive.pyz", "exits"),
        ("compiled.pyc", "exits"),
        ("-m", "wrong"),
        ("-m", "wants.inside"),
        ("-m", "no.where"),
        ("-m", "nothing"),
        ("nothing",),
    ],
    ids=" ".join,
)
def test_modules_folders_and_archives_run_as_under_python(folder: Path, arguments: tuple[str, ...]) -> None:
    py_compile.compile(str(folder / "script.py"), str(folder / "compiled.pyc"))
    plain, ours = (run(c, folder, *arguments) for c in ((sys.executable,), OURS))
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ((), {}, "usage"),
        (("--unknown", "script.py"), {}, "usage"),
        (("nowhere.py",), {}, "can't open file"),
        (("script.py", "falls"), {"LLAMAHYBRID_RAM": "lots"}, "LLAMAHYBRID_RAM=lots"),
    ],
)
def test_missing_programs_are_one_line_and_an_exit_status(
    folder: Path, arguments: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    done = run(OURS, folder, *arguments, **env)
    assert done.returncode == 2
    assert words in done.stderr
    assert not done.stdout
    assert "Traceback" not in done.stderr
    assert words == "usage" or len(done.stderr.splitlines()) == 1


def test_safe_path_keeps_the_folder_of_the_script_out(folder: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("python -P came with 3.11")
    done = run((sys.executable, "-P", "-m", "llamahybrid", "run"), folder.parent, "place/script.py", "falls")
    assert '"near": null' in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_interrupt_ends_the_program_as_under_python(folder: Path) -> None:
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background job ignores it
    (folder / "waits.py").write_text(f"import os, signal\n{heard}\nos.kill(os.getpid(), signal.SIGINT)\n")
    plain, ours = (run(c, folder, "waits.py") for c in ((sys.executable,), OURS))
    assert ours.returncode == plain.returncode == -signal.SIGINT


PROGRAM = """
import sys
from llama_cpp import Llama
class Mine(Llama):
    pass
PROMPTS = "a" * 90, "a" * 60, "a" * 90
for cls in (Llama, Mine):
    llm = cls(sys.argv[1], n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    texts = [llm(p, max_tokens=6, temperature=0)["choices"][0]["text"] for p in PROMPTS]
    print(repr(texts), getattr(getattr(llm, "last_request", None), "cached", 0), type(llm).__name__)
    print(getattr(getattr(llm, "prompt_cache", None), "ram_bytes", 0), file=sys.stderr)
    llm.close()
"""


def test_unmodified_program_reuses_with_the_same_text(tmp_path: Path, tiny_model: TinyModel) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    model = str(tiny_model("qwen35"))
    plain, ours, off = (
        run(command, tmp_path, "program.py", model, LLAMAHYBRID_ENGINE="stock", LLAMAHYBRID_RAM=ram)
        for command, ram in (((sys.executable,), ""), (OURS, "64MiB"), (OURS, "0"))
    )
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout.replace(" 0 ", " 90 ")
    assert ours.stderr.split() == [str(64 << 20)] * 2
    assert off.stdout == plain.stdout


OWN = """
import llamahybrid, sys
{}
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
print(isinstance(llm, llamahybrid.Llama))
llm.close()
"""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("run", "from llamahybrid import Llama"),
        ("run", "from llamahybrid import install; install(n_parallel=1)"),
        ("run", "from llamahybrid import uninstall"),
        ("run", "import llama_cpp; from llamahybrid import Llama"),
        ("record", "from llamahybrid import Llama"),
        ("record", ""),
    ],
)
def test_program_may_import_llamahybrid_itself(
    tmp_path: Path, tiny_model: TinyModel, line: str, command: str
) -> None:
    (tmp_path / "own.py").write_text(OWN.format(line))
    words = (*OURS[:-1], command, *(["--out", "trace.jsonl"] if command == "record" else []))
    done = run(words, tmp_path, "own.py", str(tiny_model("qwen35")), LLAMAHYBRID_ENGINE="stock")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    assert command == "run" or (tmp_path / "trace.jsonl").stat().st_size


def test_help_of_run_names_its_settings() -> None:
    shown = CliRunner().invoke(app, ["run", "--help"])
    assert shown.exit_code == 0
    assert "LLAMAHYBRID_RAM" in shown.output
