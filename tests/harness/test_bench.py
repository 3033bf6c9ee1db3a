"""The bench counts against the oracle, runs peers in turn, and restarts from disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamahybrid.errors import TargetError
from llamahybrid.harness import bench
from llamahybrid.harness.bench import Bench, Results
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.targets.choice import target
from llamahybrid.harness.workloads.speech import Vocabulary
from llamahybrid.harness.workloads.tokens import Workload, thinking_stripped

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


def test_bench_measures_each_target_on_each_workload(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_results_of_another_format_are_refused() -> None:
    with pytest.raises(ValueError, match="format"):
        Results.from_json({"format": 99})
