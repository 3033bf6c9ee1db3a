"""The catalogue: every probe explains itself, says what is known of it, and which patch mends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamahybrid.engine import sdist, series
from llamahybrid.harness.hazards import catalogue
from llamahybrid.harness.hazards.catalogue import PROBES, find
from llamahybrid.harness.hazards.outcome import Outcome, Verdict
from llamahybrid.harness.hazards.runner import Result
from tests.harness.hazards.verdicts import surprise


def test_every_probe_of_every_family_is_listed_once_and_explains_itself() -> None:
    families = [value.PROBES for value in vars(catalogue).values() if hasattr(value, "PROBES")]
    assert sum(map(len, families)) == len({probe.id for probe in PROBES}) == len(PROBES)
    assert all(probe.title and probe.done and probe.site and probe.sound for probe in PROBES)


def test_a_probe_is_found_by_its_id() -> None:
    assert [find(probe.id) for probe in PROBES] == list(PROBES)
    with pytest.raises(ValueError, match="no probe called nonsense; there are: rollback-one-batch, "):
        find("nonsense")


def test_what_stock_does_wrong_names_its_patch_and_is_mended() -> None:
    numbers = set(series.sets(sdist.PIN.version))
    for probe in PROBES:
        assert set(probe.patches) <= numbers
        for model in probe.known:
            verdict, says = probe.mended(model)
            assert verdict in (Verdict.EXACT, Verdict.REFUSED)
            assert says
        assert set(probe.otherwise) <= set(probe.also)
        if not all(verdict.sound for verdict in probe.known.values()):
            assert probe.patches, probe.id


def test_stock_is_far_from_sound() -> None:
    verdicts = [probe.stock for probe in PROBES]
    assert verdicts.count(Verdict.WRONG) >= 15
    assert verdicts.count(Verdict.DIED) >= 8
    assert {number for probe in PROBES for number in probe.patches} >= {
        f"{n:04}" for n in (*range(1, 14), 15, 17, 18, 20, 25, 26, 27, 28, 30)
    }


def test_another_verdict_or_detail_is_a_surprise() -> None:
    """What the tests of the families rest on."""
    for probe, model in [(each, model) for each in PROBES for model in each.known]:
        mended, says = probe.mended(model)
        good = Result(probe, model, Outcome(mended, says), 0.0)
        assert surprise(good, patched=True) is None
        for verdict in set(Verdict) - {mended}:
            assert surprise(replace(good, outcome=Outcome(verdict, says)), patched=True)
        assert surprise(replace(good, outcome=Outcome(mended, f"{says} 1")), patched=True)
        for verdict in Verdict:
            found = surprise(replace(good, outcome=Outcome(verdict, "SIGABRT")), patched=False)
            assert (found is None) == (verdict is probe.known[model])
        hung = Outcome(Verdict.DIED, "hung: killed after 240 s")
        assert surprise(replace(good, outcome=hung), patched=False)
