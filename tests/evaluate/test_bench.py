"""The bench measures what it says: counts against the oracle, peers in turn, restarts from disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamahybrid.errors import TargetError
from llamahybrid.evaluate import bench
from llamahybrid.evaluate.bench import ALONE, Bench, Cell, Results, together
from llamahybrid.evaluate.conversation import Answer, Request
from llamahybrid.evaluate.report import Sameness
from llamahybrid.evaluate.speech import Speech, Vocabulary
from llamahybrid.evaluate.targets.base import Ask, ModelFile, Reply, Session, Shape, Target
from llamahybrid.evaluate.targets.choice import target
from llamahybrid.evaluate.workloads import Workload, thinking_stripped

WORDS = Vocabulary(tuple(range(10, 60)), 3, 4)
SHORT = Workload("thinking stripped", thinking_stripped)


class Dying(Target):
    """A target that does not open."""

    name, kind, opened = "dying", "ours", 0

    @contextmanager
    def open(self, model: ModelFile | None, shape: Shape) -> Iterator[Session]:
        type(self).opened += 1
        raise TargetError("it does not open")
        yield

    def versions(self) -> dict[str, str]:
        return {}


def test_peers_in_turn(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RESTART_TOKENS", 300)
    monkeypatch.setattr(bench, "SAVED_TOKENS", 300)
    model = ModelFile("tiny", tiny_model("qwen35"), {"n_threads": 1})
    ran: list[str] = []
    told: list[Results] = []
    run = Bench(
        [target("stock"), target("ours"), Dying()],
        model,
        rounds=1,
        clients=(2,),
        alone=[SHORT],
        progress=lambda name, done, of: ran.append(f"{name} {done}/{of}"),
        found=told.append,
    )
    results = run.run()
    cells = {(cell.workload, cell.target): cell for cell in results.cells}
    ours, stock = cells[SHORT.name, "ours"], cells[SHORT.name, "stock"]
    assert ours.ratio is not None
    assert stock.ratio is not None
    assert ours.ratio <= SHORT.bound < 2 < stock.ratio
    assert ours.ttft is not None
    both = cells["2 clients at once", "ours"]
    assert (both.requests, both.error) == (2 * bench.TURNS, None)
    assert both.tokens_per_second is not None
    again = cells["restart, from disk", "ours"]
    assert again.decoded is not None
    assert again.least is not None
    assert again.least <= again.decoded < 300, "the answer was kept, too"
    assert "stock" not in {t for name, t in cells if name.startswith("restart")}
    assert all("does not open" in (cells[name, "dying"].error or "") for name in (SHORT.name, both.workload))
    for name in ("ours", "stock"):
        saving = cells[bench.SAVED, name].saving
        assert saving is not None, cells[bench.SAVED, name].error
        assert saving.bytes > 100_000
        assert min(saving.save, saving.restore, saving.memcpy) > 0
    assert Dying.opened == 4, "once a workload"
    assert len(ran) == len(told) == 11
    assert [each.complete for each in told] == [False] * 10 + [True]
    assert told[-1] == results
    assert [cell.workload for cell in told[0].cells] == [SHORT.name], "what there is, from the first part on"
    assert results.versions["ours"]["llama-cpp-python"]
    assert re.fullmatch(r"libllama\.\w+ \([0-9a-f]{8}\)", results.versions["ours"]["library"])
    assert Results.from_json(json.loads(json.dumps(results.as_json()))) == results


@pytest.mark.parametrize("workload", [*ALONE, together(4)], ids=lambda w: w.name)
def test_its_conversations_fit_their_contexts(workload: Workload) -> None:
    conversation = workload.start(Speech(WORDS))
    asked: Request | None = next(conversation)
    longest = 0
    while asked is not None:
        longest = max(longest, len(asked.tokens) + asked.max_tokens)
        try:
            asked = conversation.send(Answer(tuple([11] * asked.max_tokens), lambda _: ""))
        except StopIteration:
            asked = None
    assert longest * workload.clients <= workload.n_ctx


def test_a_ratio_needs_both_counts() -> None:
    assert Cell("w", "t", decoded=3, least=2).ratio == 1.5
    assert Cell("w", "t", decoded=3).ratio is None
    assert Cell("w", "t", least=3).ratio is None


def test_results_of_another_format_are_refused() -> None:
    with pytest.raises(ValueError, match="format"):
        Results.from_json({"format": 99})


def test_what_results_of_before_lack_is_not_in_them() -> None:
    old = {"workload": "a", "target": "b", "requests": 1}
    data = {"made": "", "machine": {}, "model": {}, "rounds": 1, "versions": {}, "format": 1, "cells": [old]}
    assert Results.from_json(data).cells == (Cell("a", "b", 1),)


class HalfMute(Session):
    """Tells of every other request what it decoded, and nothing of all together."""

    def __init__(self, hides: bool) -> None:
        self.asked, self._hides = 0, hides
        self.vocabulary = Vocabulary(tuple(range(16)), None, None)

    def ask(self, ask: Ask) -> Reply:
        self.asked += 1
        hidden = self._hides and self.asked % 2 == 0
        return Reply("x", 0.1, 0.1, ask.tokens, (1,), len(ask.tokens), decoded=None if hidden else 5)

    def sameness(self, ask: Ask, reply: Reply) -> tuple[Sameness, str]:
        raise NotImplementedError


@pytest.mark.parametrize("hides", [False, True])
def test_what_some_requests_hide_is_in_no_sum_of_the_others(hides: bool) -> None:
    measured, session = bench._Measured(), HalfMute(hides)
    bench._play(session, Workload("it", thinking_stripped, measured_from=0), measured, first=True)
    assert measured.decoded == (None if hides else 5 * session.asked)
