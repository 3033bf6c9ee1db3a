"""A check continues where one model fails, and reports it; targets are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamahybrid.errors import EngineError, TargetError
from llamahybrid.harness import check, directed
from llamahybrid.harness.check import KINDS, Check, models
from llamahybrid.harness.report import Verdict, WorkloadFigures
from llamahybrid.harness.targets.base import ModelFile, Shape, Target
from llamahybrid.harness.workloads.tokens import Workload, exact_append
from tests.harness.reports import verdict, workload


class Pretend(Target):
    """Fails on models called "bad"."""

    kind = "pretend"

    def __init__(self, needs_model: bool = True) -> None:
        self.name, self.needs_model = "pretend", needs_model
        self.opened: list[tuple[str | None, Shape]] = []
        self.closed = 0

    @contextmanager
    def open(self, model: ModelFile | None, shape: Shape) -> Iterator[Any]:
        if model is not None and model.name == "bad":
            raise TargetError("it died")
        self.opened.append((model.name if model else None, shape))
        yield SimpleNamespace(takes_chats=True, takes_tokens=False, decoded=lambda: 0)

    def versions(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        self.closed += 1


class Silent:
    """Plays nothing."""

    def __init__(self, session: object) -> None:
        pass

    def converse(self, workload: Workload) -> tuple[()]:
        return ()


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(session: object, played: Workload, *more: object) -> WorkloadFigures:
        return workload(played.name, 1)

    monkeypatch.setattr(directed, "PROBES", ())
    monkeypatch.setattr(directed, "memory", lambda session: workload("memory", 1))
    monkeypatch.setattr(check, "Player", Silent)
    monkeypatch.setattr(check, "workload_figures", figures)


def model(name: str, chats: bool = True) -> ModelFile:
    return ModelFile(name, Path(name), chats=chats)


def test_failing_model_is_named_and_others_are_measured() -> None:
    target = Pretend()
    hazards = (verdict("hazard:x"),)
    given = [model("one"), model("bad"), model("two")]
    done = Check([target], given, (), lambda _: hazards).run()
    (found,) = done.targets
    assert found.error == "bad: it died"
    assert [each.workload for each in found.workloads] == ["one: memory", "two: memory"]
    assert [each.requests[0].workload for each in found.workloads] == ["one: memory", "two: memory"]
    assert (found.hazards, target.closed) == (hazards, 1)
    assert done.models == ("one", "bad", "two")


def test_failing_hazards_keep_the_measurements() -> None:
    def hazards(target: Target) -> tuple[Verdict, ...]:
        raise EngineError("it hangs when it is loaded")

    (found,) = Check([Pretend()], [model("one")], (), hazards).run().targets
    assert found.error == "hazards: it hangs when it is loaded"
    assert [each.workload for each in found.workloads] == ["memory"]


def test_unsuitable_workloads_are_reported_as_left_out() -> None:
    chat = Workload("a chat", exact_append, n_ctx=512, template=True, clients=3)
    tokens = Workload("tokens", exact_append)
    target, told = Pretend(), list[str]()
    given = [model("one"), model("two", chats=False)]
    (found,) = Check([target], given, (chat, tokens), progress=told.append).run().targets
    ran = [each.workload for each in found.workloads if each.requests]
    assert ran == ["one: memory", "one: a chat", "two: memory"]
    assert ("one", Shape(512, 3)) in target.opened
    assert "pretend, one: a chat" in told
    assert "pretend, two: a chat" not in told
    left_out = [each for each in found.workloads if not each.requests]
    assert [each.workload for each in left_out] == ["one: tokens", "two: tokens"]
    for each in left_out:
        assert [(one.outcome, one.detail) for one in each.verdicts] == [
            ("cannot tell", "it did not run: the target takes no token ids")
        ]


def test_temporary_models_are_removed() -> None:
    with models([]) as made:
        assert [each.name for each in made] == [kind.arch for kind in KINDS]
        assert all(each.path.is_file() for each in made)
        assert [each.options.get("swa_full") for each in made] == [None, False, None]
    assert not any(each.path.exists() for each in made)
