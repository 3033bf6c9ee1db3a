"""Classes in processes of their own: their library, their counters, and what becomes of those that die."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid import tiny
from llamahybrid.cli.main import app
from llamahybrid.engine import installed
from llamahybrid.errors import TargetError
from llamahybrid.evaluate.report import Report
from llamahybrid.evaluate.targets.base import Ask, ModelFile, Session, Shape
from llamahybrid.evaluate.targets.choice import target
from llamahybrid.evaluate.targets.local import LocalTarget, Process, library_environment


def test_only_ours_runs_on_the_chosen_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "/chosen")
    chosen = {kind: library_environment(None, kind)["LLAMAHYBRID_ENGINE"] for kind in ("ours", "stock")}
    assert chosen == {"ours": "/chosen", "stock": "stock"}


def test_conversations_that_the_user_keeps_are_none_of_a_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run left there would be reused as if it had been said in this one."""
    monkeypatch.setenv("LLAMAHYBRID_DISK", "/chats")
    ours = LocalTarget("ours", "ours")
    assert "LLAMAHYBRID_DISK" not in ours._environment()
    ours.kept_in = "/for/this/run"
    assert ours._environment()["LLAMAHYBRID_DISK"] == "/for/this/run"


SAID_BEFORE = (
    "import llama_cpp\nasked = vars(llama_cpp).setdefault('asked', [])\nclass Mine(llama_cpp.Llama):\n"
    + "".join(
        f"    {line}\n"
        for line in (
            "def generate(self, tokens, *args, **kwargs):",
            "    asked.append(tuple(tokens))",
            "    self.last_request = type('Report', (), {'cached': len(asked) - 1, 'reason': None})",
            "    yield from super().generate(tokens, *args, **kwargs)",
        )
    )
)


def test_what_a_class_remembers_is_gone_in_the_next_session(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SAID_BEFORE)
    model = ModelFile("tiny", tiny.make("llama", tmp_path / "tiny.gguf"))
    mine = target(f"class:{file}:Mine")
    for _ in range(2):
        with mine.open(model, Shape(256)) as session:
            assert [session.ask(Ask(1, (5, 6))).reported for _ in range(2)] == [0, 1]
    mine.close()


def test_what_a_process_prints_while_it_starts_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')\nprint('{}')\nprint('no end', end='')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = Process({**os.environ, "PYTHONPATH": path})
    try:
        assert process.call("resident") > 0
    finally:
        process.close()


def test_a_class_that_reads_standard_input_takes_no_calls(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import llama_cpp, sys\nassert sys.stdin.read() == ''\nMine = llama_cpp.Llama\n")
    model = ModelFile("tiny", tiny.make("llama", tmp_path / "tiny.gguf"))
    mine = target(f"class:{file}:Mine")
    with mine.open(model, Shape(256)) as session:
        assert session.parallel == 1
    mine.close()


def test_what_a_process_leaves_in_temporary_folders_goes_with_it() -> None:
    process = Process(dict(os.environ))
    folder = Path(process._folder.name)
    left = folder / "left"
    left.touch()
    process._process.kill()
    process.close()
    assert not folder.exists()


def test_a_library_of_its_own_is_loaded_whatever_engine_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "/chosen")
    file = tmp_path / "libllama.so"
    file.touch()
    monkeypatch.setattr(installed, "library", lambda folder, name: folder / f"lib{name}.so")
    for lib in (tmp_path, file):
        found = library_environment(lib, "ours")
        assert "LLAMAHYBRID_ENGINE" not in found
        assert found["LLAMA_CPP_LIB_PATH"] == found["MTMD_CPP_LIB"] == str(tmp_path.resolve())


def test_a_process_says_what_failed_and_goes_on_until_it_is_closed() -> None:
    process = Process(dict(os.environ))
    try:
        with pytest.raises(TargetError):
            process.call("open", kind="stock", model="/nowhere.gguf", options={}, n_ctx=256, parallel=1)
        assert process.call("resident") is not None
        process._process.kill()
        for _ in range(2):  # while it dies, and when it is known to be dead
            with pytest.raises(TargetError, match="its process died, exit status -9"):
                process.call("resident")
    finally:
        process.close()


def test_a_model_is_needed() -> None:
    with pytest.raises(TargetError, match="stock needs a model"):
        target("stock").open(None, Shape(256)).__enter__()


def test_a_folder_without_a_library_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(TargetError, match="no libllama"),
        target("stock", tmp_path).open(ModelFile("x", tmp_path), Shape(256)),
    ):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return ModelFile("llama", tiny.make("llama", tmp_path_factory.mktemp("model") / "llama.gguf"))


@pytest.fixture(scope="module")
def stock() -> Iterator[LocalTarget]:
    one = target("stock")
    assert isinstance(one, LocalTarget)
    yield one
    one.close()


def _prompt(session: Session, n: int = 60) -> tuple[int, ...]:
    assert session.vocabulary is not None
    return session.vocabulary.words[:n]


def test_counters_tell_what_stock_reused(stock: LocalTarget, model: ModelFile) -> None:
    with stock.open(model, Shape(512)) as session:
        prompt = _prompt(session)
        first = session.ask(Ask(8, prompt))
        again = session.ask(Ask(8, (*prompt, *(first.tokens or ()), 5)))
        assert (first.cached, first.decoded, first.reported) == (0, 67, None)
        assert again.cached == 67
        assert session.sameness(Ask(8), again) == ("same", "")
    assert set(stock.versions()) == {"llama-cpp-python", "llamahybrid", "library"}


def test_a_wrong_answer_is_different_and_a_sampled_one_is_judged_by_its_logits(
    stock: LocalTarget, model: ModelFile
) -> None:
    with stock.open(model, Shape(512)) as session:
        prompt = _prompt(session)
        reply = session.ask(Ask(8, prompt, seed=3))
        assert session.sameness(Ask(8, seed=3), reply) == ("same", "")
        assert isinstance(session.resident(), int)
        assert session.spell(prompt[:3])


DYING = """
import os
import llama_cpp

class Dies(llama_cpp.Llama):
    def generate(self, tokens, *args, **kwargs):
        os._exit(7)

class Refuses(llama_cpp.Llama):
    def generate(self, tokens, *args, **kwargs):
        raise KeyError("not today")
        yield 0
"""


@pytest.mark.parametrize(("name", "said"), [("Dies", "exit status 7"), ("Refuses", "not today")])
def test_a_target_that_dies_is_in_the_report(name: str, said: str, model: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    report = tmp_path / "report.json"
    arguments = ["--on", f"class:{tmp_path / 'dying.py'}:{name}", "--model", str(model.path)]
    done = CliRunner().invoke(app, ["check", "--quick", *arguments, "--json", str(report)])
    assert done.exit_code == 1
    (found,) = Report.read(report).targets
    assert found.error is not None
    assert said in found.error


def test_a_workload_on_a_class_and_its_figures(model: ModelFile, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--on", "ours", "--on", "stock", "--model", str(model.path), "--workload", "exact append"]
    done = CliRunner().invoke(app, ["check", *arguments, "--json", str(report)])
    ours, stock = Report.read(report).targets
    assert done.exit_code == 0, done.output
    for found in (ours, stock):
        figures = found.workloads[-1]
        assert figures.workload == "exact append"
        assert len(figures.requests) == 6
        assert figures.ratio is not None
        assert 1 <= figures.ratio <= 1.02
        assert {each.answer for each in figures.requests} == {"same"}
        assert {verdict.name: verdict.outcome for verdict in figures.verdicts}["reuse"] == "ok"
        last = figures.requests[-1]
        assert last.total == (last.cached or 0) + (last.left or 0)
        assert last.matched == last.cached
    assert ours.workloads[-1].requests[-1].text_hash == stock.workloads[-1].requests[-1].text_hash
