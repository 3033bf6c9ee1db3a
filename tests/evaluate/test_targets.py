"""Targets by name, and what becomes of those that die, refuse or hide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid import tiny
from llamahybrid.cli.main import app
from llamahybrid.errors import TargetError
from llamahybrid.evaluate.report import Report
from llamahybrid.evaluate.targets.base import Ask, ModelFile, Session, Shape
from llamahybrid.evaluate.targets.choice import target, targets
from llamahybrid.evaluate.targets.local import LocalTarget
from tests.evaluate.fake_server import FakeServer


@pytest.mark.parametrize(
    "name", ["", "stok", "server:/nowhere", "class:nowhere.py:X", "class:X", "ftp://x", "server:" + __file__]
)
def test_what_is_no_target_is_refused(name: str) -> None:
    with pytest.raises(TargetError):
        target(name)


def test_a_label_names_a_target_and_an_at_gives_it_a_library(tmp_path: Path) -> None:
    assert target("stock").name == "stock"
    mine = tmp_path / "x@y" / "mine.py"
    mine.parent.mkdir()
    mine.touch()
    for written, name, kind in (
        (f"patched engine=ours@{tmp_path}", "patched engine", "ours"),
        (f"stock@{tmp_path}", f"stock@{tmp_path}", "stock"),
        (f"a cache=class:{mine}:Mine@{tmp_path}", "a cache", f"class:{mine}:Mine"),
        (f"class:{mine}:Mine@{tmp_path}", f"class:{mine}:Mine@{tmp_path}", f"class:{mine}:Mine"),
    ):
        one = target(written)
        assert (one.name, one.kind) == (name, kind)
        with pytest.raises(TargetError, match=f"no libllama at {tmp_path}:"):
            one.open(ModelFile("x", tmp_path), Shape(256)).__enter__()
    assert target(f"class:{mine}:Mine").kind == f"class:{mine}:Mine"
    url = target("new=http://127.0.0.1:9/?a=b")
    assert (url.name, url.kind) == ("new", "url")
    assert target("old=server:/bin/true").name == "old"


def test_two_targets_of_one_name_are_refused() -> None:
    assert [each.name for each in targets(["stock", "again=stock"])] == ["stock", "again"]
    with pytest.raises(TargetError, match="called stock; LABEL=TARGET"):
        targets(["stock", "ours", "stock"])


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


@pytest.mark.native
def test_counters_tell_what_stock_reused(stock: LocalTarget, model: ModelFile) -> None:
    with stock.open(model, Shape(512)) as session:
        prompt = _prompt(session)
        first = session.ask(Ask(8, prompt))
        again = session.ask(Ask(8, (*prompt, *(first.tokens or ()), 5)))
        assert (first.cached, first.decoded, first.reported) == (0, 67, None)
        assert again.cached == 67
        assert session.sameness(Ask(8), again) == ("same", "")
    assert set(stock.versions()) == {"llama-cpp-python", "llamahybrid", "library"}


@pytest.mark.native
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


@pytest.mark.native
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


def test_a_server_that_is_gone_is_in_the_report(tmp_path: Path) -> None:
    with FakeServer() as server:
        url = server.url
    report = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["check", "--quick", "--on", url, "--json", str(report)])
    assert done.exit_code == 1
    assert Report.read(report).targets[0].error


def test_an_unknown_workload_is_refused_with_those_there_are() -> None:
    done = CliRunner().invoke(app, ["check", "--on", "http://127.0.0.1:1", "--workload", "nothing"])
    assert done.exit_code == 1
    assert "thinking stripped" in done.output


@pytest.mark.native
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
