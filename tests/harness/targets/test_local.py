"""Targets that are Python classes run in processes of their own, with their library and counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid import tiny
from llamahybrid.cli.main import app
from llamahybrid.errors import TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Report
from llamahybrid.harness.targets.base import ModelFile, Session, Shape
from llamahybrid.harness.targets.choice import target
from llamahybrid.harness.targets.local import LocalTarget, Process, library_environment


def test_chosen_engine_is_used_by_llamahybrid_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_ENGINE", "/chosen")
    chosen = {kind: library_environment(None, kind)["LLAMAHYBRID_ENGINE"] for kind in ("ours", "stock")}
    assert chosen == {"ours": "/chosen", "stock": "stock"}


def test_configured_disk_folder_is_not_used_by_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_DISK", "/chats")
    assert "LLAMAHYBRID_DISK" not in library_environment(None, "ours")


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


def test_class_remembers_nothing_in_the_next_session(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SAID_BEFORE)
    model = ModelFile("tiny", tiny.make("llama", tmp_path / "tiny.gguf"))
    mine = target(f"class:{file}:Mine")
    for _ in range(2):
        with mine.open(model, Shape(256)) as session:
            assert [session.ask(Request(1, (5, 6))).reported for _ in range(2)] == [0, 1]
    mine.close()


def test_class_that_reads_standard_input_loses_no_request(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import llama_cpp, sys\nassert sys.stdin.read() == ''\nMine = llama_cpp.Llama\n")
    model = ModelFile("tiny", tiny.make("llama", tmp_path / "tiny.gguf"))
    mine = target(f"class:{file}:Mine")
    with mine.open(model, Shape(256)) as session:
        assert session.parallel == 1
    mine.close()


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_model_that_cannot_be_loaded_is_refused_with_the_reason_and_the_process_goes_on(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model")
    process = Process(library_environment(None, kind))
    try:
        with pytest.raises(TargetError, match="invalid magic"):
            process.call("open", kind=kind, model=str(tmp_path / "x.gguf"), options={}, n_ctx=256, parallel=1)
        assert process.call("library")
    finally:
        process.close()


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


def test_reuse_of_stock_is_counted(stock: LocalTarget, model: ModelFile) -> None:
    with stock.open(model, Shape(512)) as session:
        prompt = _prompt(session)
        first = session.ask(Request(8, prompt))
        again = session.ask(Request(8, (*prompt, *(first.tokens or ()), 5)))
        assert (first.cached, first.decoded, first.reported) == (0, 67, None)
        assert again.cached == 67
        assert session.sameness(Request(8), again) == ("same", "")
    assert set(stock.versions) == {"llama-cpp-python", "llamahybrid", "library"}


def test_sampled_answer_is_compared_by_its_logits(stock: LocalTarget, model: ModelFile) -> None:
    with stock.open(model, Shape(512)) as session:
        prompt = _prompt(session)
        reply = session.ask(Request(8, prompt, seed=3))
        assert session.sameness(Request(8, seed=3), reply) == ("same", "")
        assert isinstance(session.resident(), int)
        assert session.spell(prompt[:3])


DYING = """
import os
import sys
import llama_cpp

class Dies(llama_cpp.Llama):
    def generate(self, tokens, *args, **kwargs):
        for line in "CUDA error: out of memory", "current device: 0", "cudaMalloc", "abort":
            print(line, file=sys.stderr, flush=True)
        os._exit(7)

class Aborts(llama_cpp.Llama):
    def generate(self, tokens, *args, **kwargs):
        os.abort()

class Refuses(llama_cpp.Llama):
    def generate(self, tokens, *args, **kwargs):
        raise KeyError("not today")
        yield 0
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Dies", "exit status 7: CUDA error: out of memory"),
        ("Aborts", "its process died, SIGABRT"),
        ("Refuses", "not today"),
        ("Misspelled", "there is no Misspelled in "),
    ],
)
def test_target_that_dies_is_reported(name: str, said: str, model: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    report = tmp_path / "report.json"
    arguments = ["--on", f"class:{tmp_path / 'dying.py'}:{name}", "--model", str(model.path)]
    done = CliRunner().invoke(app, ["check", "--quick", *arguments, "--json", str(report)])
    assert done.exit_code == 1
    (found,) = Report.read(report).targets
    assert found.error is not None
    assert said in found.error
