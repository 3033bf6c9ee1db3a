"""The bench counts against the oracle, runs peers in turn, and restarts from disk."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamahybrid.errors import TargetError
from llamahybrid.harness import bench
from llamahybrid.harness.bench import Bench
from llamahybrid.harness.report import Report, Times
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.targets.choice import target
from llamahybrid.harness.workloads.speech import Vocabulary
from llamahybrid.harness.workloads.tokens import Workload, thinking_stripped

WORDS = Vocabulary(tuple(range(10, 60)), 3, 4)
SHORT = Workload("thinking stripped", thinking_stripped)


class Dying(Target):
    """A target that does not open."""

    opened = 0

    def __init__(self) -> None:
        super().__init__("dying", "ours")

    @contextmanager
    def open(self, model: ModelFile | None, shape: Shape) -> Iterator[Session]:
        type(self).opened += 1
        raise TargetError("it does not open")
        yield


def test_bench_measures_each_target_on_each_workload(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Dying, "opened", 0)
    monkeypatch.setattr(bench, "RESTART_TOKENS", 300)
    monkeypatch.setattr(bench, "SAVED_TOKENS", 300)
    model = ModelFile("tiny", tiny_model("qwen35"), {"n_threads": 1})
    ran: list[str] = []
    told: list[Report] = []
    run = Bench(
        [target("stock"), target("ours"), Dying()],
        model,
        rounds=1,
        clients=(2,),
        alone=[SHORT],
        progress=lambda name, done, of: ran.append(f"{name} {done}/{of}"),
        found=told.append,
    )
    report = run.run()
    assert report.complete
    assert told[-1].targets[:2] == report.targets[:2]
    assert [[w.workload for w in each.workloads] for each in told[0].targets] == [[SHORT.name]]
    found = {(w.workload, each.name): w for each in report.targets for w in each.workloads}
    ours, stock = found[SHORT.name, "ours"], found[SHORT.name, "stock"]
    assert ours.ratio is not None
    assert stock.ratio is not None
    assert ours.ratio <= SHORT.bound < 2 < stock.ratio
    assert ours.times is not None
    assert ours.times.ttft is not None
    both = found["2 clients at once", "ours"]
    assert len(both.requests) == 2 * bench.TURNS
    assert (both.times or Times()).tokens_per_second is not None
    again = found["restart, from disk", "ours"]
    assert again.decoded is not None
    assert again.least is not None
    assert again.least <= again.decoded < 300, "the answer was kept, too"
    assert "stock" not in {name for workload, name in found if workload.startswith("restart")}
    for name in ("ours", "stock"):
        saving = (found[bench.SAVED, name].times or Times()).saving
        assert saving is not None
        assert saving.bytes > 100_000
        assert min(saving.save, saving.restore, saving.memcpy) > 0
    dying = report.targets[-1]
    for workload in (SHORT.name, both.workload):
        assert f"{workload}: it does not open" in (dying.error or "")
    assert Dying.opened == 4, "once a workload"
    assert len(ran) == 11
    assert not list(tmp_path.iterdir()), "no folder of conversations is left"
    versions = report.targets[1].versions
    assert versions["llama-cpp-python"]
    assert re.fullmatch(r"libllama\.\w+ \([0-9a-f]{8}\)", versions["library"])


def test_bench_without_time_left_is_complete_and_says_what_did_not_run() -> None:
    run = Bench(
        [Dying()], ModelFile("tiny", Path(__file__)), rounds=1, clients=(2,), alone=[SHORT], minutes=1e-9
    )
    report = run.run()
    assert report.complete, "exit status 130 is of Ctrl-C"
    (found,) = report.targets
    assert {SHORT.name, "2 clients at once"} <= {each.workload for each in found.workloads}
    for each in found.workloads:
        (verdict,) = each.verdicts
        assert verdict.outcome == "cannot tell"
        assert "the time was over" in verdict.detail
