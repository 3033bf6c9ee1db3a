"""Hazards of a libllama as verdicts, and `llamahybrid hazards`; the outcomes are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.hazards.case import Probe
from llamahybrid.harness.hazards.catalogue import PROBES, find
from llamahybrid.harness.hazards.effect import Behaviour, Effect
from llamahybrid.harness.hazards.runner import Library, Result
from llamahybrid.harness.report import Report

MENDED = find("rollback-to-batch-start")
NAMES = (MENDED.id, "rollback-twice")
LIBRARY = Library("/home/ada/bin/libllama.so", "CPU", {})
CHOSEN = [word for name in NAMES for word in ("--probe", name)]


def made(found: Behaviour, detail: str = "no /home/ada/x [red]", probe: Probe = MENDED) -> Result:
    return Result(probe, "qwen35", Effect(found, detail, 0.25))


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`finding(verdict, stop_after)`: the verdict of each probe; Ctrl-C after `stop_after` probes."""

    def prepare(found: Behaviour, stop_after: int | None = None) -> None:
        def run(
            cases: Sequence[tuple[Probe, str]],
            under_test: Library,
            *,
            done: Callable[[Result], Any],
            **_: object,
        ) -> None:
            for probe, _model in reversed(cases[:stop_after]):  # results come in any order
                done(made(found, probe=probe))
            if stop_after is not None:
                raise KeyboardInterrupt

        monkeypatch.setattr(runner, "run", run)
        monkeypatch.setattr(runner, "library", lambda path: LIBRARY)
        monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))

    return prepare


def hazards(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["hazards", *CHOSEN, *map(str, arguments)], env={"COLUMNS": "80"})
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (Behaviour.EXACT, "ok"),
        (Behaviour.REFUSED, "ok"),
        (Behaviour.WRONG, "bad"),
        (Behaviour.DIED, "bad"),
        (Behaviour.NOT_APPLICABLE, "cannot tell"),
        (Behaviour.FAILED, "cannot tell"),
    ],
)
def test_result_becomes_a_verdict_that_names_its_cure(found: Behaviour, outcome: str) -> None:
    verdict_ = made(found).verdict(None)
    assert (verdict_.name, verdict_.outcome) == (f"hazard:{MENDED.id}", outcome)
    assert verdict_.detail.startswith(f"{MENDED.title}: {found.value}; qwen35: no /home/ada/x [red]")
    assert ("cured by the set reuse (0001)" in verdict_.detail) is not found.sound
    assert verdict_.detail.endswith(
        "our patches: exact, the rollback was refused, snapshot and cut were granted."
    )


def test_hazard_that_the_library_has_no_patch_for_is_no_fault() -> None:
    probe = find("nan-in-attention")
    result = Result(probe, probe.model, Effect(probe.known[probe.model].stock))
    assert result.verdict(frozenset({"0001"})).outcome == "cannot tell"
    assert result.verdict(frozenset(probe.patches)).outcome == "bad"


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Behaviour.WRONG, 1),
        (Behaviour.EXACT, 0),
        (Behaviour.FAILED, 1),
        (Behaviour.NOT_APPLICABLE, 1),  # nothing was tried
    ],
)
def test_exit_status_is_0_for_a_sound_library(
    finding: Callable[..., None], found: Behaviour, status: int
) -> None:
    finding(found)
    code, said = hazards()
    assert code == status, said
    assert "[red]" in said, "texts are shown as they are"


def test_report_is_in_the_order_of_probes_and_names_no_home(
    finding: Callable[..., None], tmp_path: Path
) -> None:
    finding(Behaviour.WRONG)
    file = tmp_path / "r.json"
    assert hazards("--json", file)[0] == 1
    assert "/home/ada" not in file.read_text()
    (target,) = Report.read(file).targets
    assert (target.name, target.versions["library"]) == ("libllama", "~/bin/libllama.so"), (
        "compare pairs names"
    )
    assert [each.name for each in target.hazards] == [f"hazard:{name}" for name in NAMES]


def test_stopped_run_reports_what_it_found(finding: Callable[..., None], tmp_path: Path) -> None:
    finding(Behaviour.WRONG, stop_after=1)
    code, said = hazards("--json", tmp_path / "r.json")
    assert code == 130
    assert "before its end" in said
    report = Report.read(tmp_path / "r.json")
    assert not report.complete
    assert [each.name for each in report.targets[0].hazards] == [f"hazard:{NAMES[0]}"]


def test_names_are_whole_at_80_columns(finding: Callable[..., None]) -> None:
    finding(Behaviour.WRONG)
    done = CliRunner().invoke(app, ["hazards"], env={"COLUMNS": "80"})
    assert max(map(len, done.output.splitlines())) <= 80
    for probe in PROBES:
        assert f"{probe.id} " in done.output


@pytest.mark.parametrize(("model", "cured"), [("qwen35", "reuse (0009)"), ("lfm2", "hardening (0009 0029)")])
def test_the_cure_is_that_of_the_model(model: str, cured: str) -> None:
    result = Result(find("failed-file-restore"), model, Effect(Behaviour.DIED))
    assert f"cured by the set {cured}" in result.verdict(None).detail
