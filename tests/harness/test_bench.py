"""The bench counts against the oracle, and runs peers in turn."""

from __future__ import annotations

import itertools
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
from llamahybrid.harness.workloads.tokens import Workload, thinking_stripped
from tests.harness.pretended import PretendTarget

SHORT = Workload("thinking stripped", thinking_stripped)
FILE = ModelFile("tiny", Path(__file__))


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
    model = ModelFile("tiny", tiny_model("qwen35"), {"n_threads": 1})
    ran: list[str] = []
    told: list[Report] = []
    run = Bench(
        [target("stock"), target("ours"), Dying()],
        [model],
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
    dying = report.targets[-1]
    assert dying.error == f"{SHORT.name}, {both.workload}: it does not open", "one error is shown once"
    assert Dying.opened == 2, "once a workload"
    assert len({each.rpartition(" ")[2] for each in ran}) == 6
    assert not list(tmp_path.iterdir()), "no folder is left"
    versions = report.targets[1].versions
    assert versions["llama-cpp-python"]
    assert re.fullmatch(r"libllama\.\w+ \([0-9a-f]{8}\)", versions["library"])


def test_bench_without_time_left_runs_the_shortest_workload_and_names_the_others() -> None:
    targets = [PretendTarget(), PretendTarget()]
    targets[1].name = "other"
    run = Bench(targets, [FILE], rounds=2, clients=(2,), alone=[SHORT], minutes=1e-9)
    report = run.run()
    assert report.complete, "exit status 130 is of Ctrl-C"
    for found in report.targets:
        assert found.error is None
        ran = {each.workload: each for each in found.workloads}
        assert ran["2 clients at once"].times is not None
        (verdict,) = ran[SHORT.name].verdicts
        assert (verdict.outcome, verdict.detail) == (
            "cannot tell",
            "it did not run: the time was over (see --minutes)",
        )


def test_each_workload_has_a_process_in_which_nothing_ran_before() -> None:
    class Logged(PretendTarget):
        def close(self, patience: float = 20.0) -> None:
            self.opened.append(("closed", Shape(1)))
            super().close(patience)

    target = Logged()
    Bench([target], [FILE], rounds=2, clients=(), alone=[SHORT], minutes=9).run()
    before = [name for name, _ in target.opened]
    assert before.count("tiny") == 3, "the speed, and two rounds"
    assert all("closed" in pair for pair in itertools.pairwise(before))


def test_bench_says_which_workloads_a_target_does_not_take() -> None:
    pretend = PretendTarget()
    pretend.takes_tokens = False
    (found,) = Bench([pretend], [FILE], clients=(), alone=[SHORT]).run().targets
    (verdict,) = found.workloads[0].verdicts
    assert (verdict.outcome, verdict.detail) == (
        "cannot tell",
        "it did not run: the target takes no token ids",
    )
