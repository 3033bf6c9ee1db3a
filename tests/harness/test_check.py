"""A check of pretended targets: selected workloads, time limits, interrupted runs."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from llamahybrid.errors import EngineError, TargetError
from llamahybrid.harness.check import Check, busy_share, idle_cores, models
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.plan import COMPARING, LATEST
from llamahybrid.harness.report import PROBE, Report, Sameness, TargetFigures, Verdict
from llamahybrid.harness.targets.base import ModelFile, Reply, Session, Shape, Target
from llamahybrid.harness.workloads.tokens import Workload, exact_append, regenerate
from tests.harness.pretended import PretendSession, PretendTarget
from tests.harness.reports import verdict

APPEND = Workload("append", exact_append)
AGAIN = Workload("again", regenerate)


def model(name: str, chats: bool = True) -> ModelFile:
    return ModelFile(name, Path(name), chats=chats)


def measured(target: TargetFigures) -> list[str]:
    """Names of the workloads that ran, without the directed probes."""
    return [each.workload for each in target.workloads if each.requests and PROBE not in each.workload]


def test_failing_model_is_named_and_others_are_measured() -> None:
    target, hazards = PretendTarget(), (verdict("hazard:x"),)
    given = [model("one"), model("bad"), model("two")]
    done = Check([target], given, (APPEND,), lambda _: hazards).run()
    (found,) = done.targets
    assert found.error == "bad: it died"
    assert measured(found) == ["one: append", "two: append"]
    assert (found.hazards, target.closed) == (hazards, 1)
    assert (done.models, done.complete) == (("one", "bad", "two"), True)


def test_failing_hazards_keep_the_measurements() -> None:
    def hazards(target: Target) -> tuple[Verdict, ...]:
        raise EngineError("it hangs when it is loaded")

    (found,) = Check([PretendTarget()], [model("one")], (APPEND,), hazards).run().targets
    assert found.error == "hazards: it hangs when it is loaded"
    assert measured(found) == ["append"]


def test_unsuitable_workloads_are_reported_as_left_out() -> None:
    chat = Workload("a chat", exact_append, n_ctx=512, template=True, clients=3)
    target, told = PretendTarget(), list[str]()
    target.takes_tokens = False
    given = [model("one"), model("two", chats=False)]
    run = Check([target], given, (chat, APPEND), progress=lambda text, done, of: told.append(text))
    (found,) = run.run().targets
    assert ("one", Shape(512, 3)) in target.opened
    assert "pretend, one: a chat" in told
    assert "pretend, two: a chat" not in told
    left_out = [each for each in found.workloads if each.workload.endswith("append")]
    assert [each.workload for each in left_out] == ["one: append", "two: append"]
    for each in left_out:
        assert [(one.outcome, one.detail) for one in each.verdicts] == [
            ("cannot tell", "it did not run: the target takes no token ids")
        ]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_stopped_check_reports_what_it_found(stop: type[BaseException]) -> None:
    def asked(ask: Request) -> None:
        if ask.seed == 3:  # the second workload is in its middle
            raise stop

    target, seen = PretendTarget(asked=asked), list[Report]()
    done = Check([target], [model("one")], (APPEND, AGAIN), found=seen.append).run()
    assert not done.complete
    assert measured(done.targets[0]) == ["append"]
    assert [measured(report.targets[0]) for report in seen][-1] == ["append"], "after each step"
    assert target.closed


def test_check_without_time_left_runs_one_probe_and_names_the_rest() -> None:
    asked: list[Request] = []
    target, told = PretendTarget(asked=asked.append), list[str]()
    run = Check([target], [model("one")], (APPEND, AGAIN), minutes=1e-9)
    run.progress = lambda text, done, of: told.append(text)
    (found,) = run.run().targets
    assert told == ["pretend, one: measuring the model's speed", "pretend, one: a prompt that goes on"]
    assert len(asked) == 3, "one to measure the speed, two of the probe"
    assert [each.workload for each in found.workloads if each.ran] == [f"{PROBE}a prompt that goes on"]
    (append,) = (each for each in found.workloads if each.workload == "append")
    assert "the time was over (see --minutes)" in append.verdicts[0].detail
    assert found.error is None


def test_check_of_workloads_alone_runs_the_first_whatever_the_time() -> None:
    run = Check([PretendTarget()], [model("one")], (APPEND, AGAIN), minutes=1e-9, probes=False)
    (found,) = run.run().targets
    assert measured(found) == ["append"]
    assert len(found.workloads[0].requests) == 2, "fewer show no reuse"


def test_target_on_which_nothing_ran_is_no_success() -> None:
    target = PretendTarget()
    target.takes_tokens = False
    (found,) = Check([target], [model("one")], (APPEND,), probes=False).run().targets
    assert found.error == "nothing ran: the target takes no token ids"


def test_request_is_given_up_when_the_time_is_long_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(PretendTarget):
        def open(self, model: ModelFile | None, shape: Shape) -> AbstractContextManager[Session]:
            if shape.n_ctx == 256:
                assert self.until is not None
                monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
                raise TargetError(f"no answer within {self.timeout():.1f} s")
            return super().open(model, shape)

    hangs = Workload("hangs", exact_append, n_ctx=256)
    (found,) = Check([Hanging()], [model("one")], (AGAIN, hangs), minutes=9, probes=False).run().targets
    assert [(each.workload, each.ran) for each in found.workloads] == [("again", True), ("hangs", False)]
    assert found.error is None, "a lack of time is no fault of the target"
    assert "no answer within" in found.workloads[1].verdicts[0].detail


def test_verdicts_before_a_comparison_that_took_too_long_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    now, compared = [began], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    target = PretendTarget()

    def sameness(session: Session, request: Request, reply: Reply) -> tuple[Sameness, str]:
        if request.seed is None:  # the first workload has no limit
            return "same", ""
        compared.append(reply.text)
        if len(compared) > 1:  # it begins in time and ends long after it
            now[0] = began + 60 * 9 * (COMPARING + LATEST) / 2
            if target.until is not None and now[0] > target.until:
                raise TargetError("no answer")
        return "different", "another text"

    monkeypatch.setattr(PretendSession, "sameness", sameness)
    (found,) = Check([target], [model("one")], (APPEND, AGAIN), minutes=9, probes=False).run().targets
    answers = [each.answer for each in found.workloads[1].requests]
    assert answers[-2:] == ["different", "different"], "the last requests, which reuse most, come first"
    assert {*answers[:-2]} == {"not compared"}


def test_busy_cores_are_those_that_were_not_idle() -> None:
    before = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1 1"
    after = "cpu  160 0 65 810 65 0 0 0 0 0\ncpu0 1 1 1 1"
    assert busy_share(before, after) == 0.75
    assert 1 <= idle_cores() <= (os.cpu_count() or 1)


def test_workloads_are_shortened_to_fit_into_the_time() -> None:
    target = PretendTarget()
    full, short = (
        Check([target], [model("one")], (APPEND,), minutes=minutes).run().targets[0].workloads[-1]
        for minutes in (None, 0.3)
    )
    assert full.scale == 1.0 > short.scale
    assert len(full.requests) == len(short.requests), "as many turns"
    assert sum(each.total or 0 for each in full.requests) > sum(each.total or 0 for each in short.requests)


def test_temporary_models_are_removed() -> None:
    with models([], gpu_layers=-1) as made:
        assert [each.name for each in made] == ["qwen35", "gemma3", "llama"]
        assert all(each.options["n_gpu_layers"] == -1 and each.server[:2] == ["-ngl", "999"] for each in made)
        assert all(each.path.is_file() for each in made)
        assert [each.options.get("swa_full") for each in made] == [None, False, None]
    assert not any(each.path.exists() for each in made)
