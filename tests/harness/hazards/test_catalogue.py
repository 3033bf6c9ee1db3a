"""The catalogue: each probe has a description, known verdicts, and the patches that fix it."""

from __future__ import annotations

import pytest

from llamahybrid.engine import sdist, series
from llamahybrid.harness.hazards import case
from llamahybrid.harness.hazards.case import Known
from llamahybrid.harness.hazards.catalogue import PROBES, find
from llamahybrid.harness.hazards.effect import Behaviour


def test_every_probe_is_listed_once_and_described() -> None:
    assert len({probe.id for probe in PROBES}) == len(PROBES)
    assert all(probe.title and probe.done and probe.site for probe in PROBES)


def test_probe_is_found_by_its_id() -> None:
    assert [find(probe.id) for probe in PROBES] == list(PROBES)
    with pytest.raises(ValueError, match="no probe called nonsense; there are: rollback-one-batch, "):
        find("nonsense")


def test_faults_of_stock_have_a_patch_that_fixes_them() -> None:
    numbers = set(series.sets(sdist.PIN.version))
    for probe in PROBES:
        assert set(probe.patches) <= numbers
        for known in probe.known.values():
            assert known.patched in (Behaviour.EXACT, Behaviour.REFUSED)
            assert known.says
        if not all(known.stock.sound for known in probe.known.values()):
            assert probe.patches, probe.id


def test_catalogue_has_faults_for_each_patch() -> None:
    verdicts = [probe.known[probe.model].stock for probe in PROBES]
    assert verdicts.count(Behaviour.WRONG) >= 15
    assert verdicts.count(Behaviour.DIED) >= 8
    assert {number for probe in PROBES for number in probe.patches} >= {
        f"{n:04}" for n in (*range(1, 14), 15, 17, 25, 26, 27, 28, 30)
    }


def test_known_outcomes_are_those_of_the_probes() -> None:
    assert list(case.table()) == [probe.id for probe in PROBES]
    probe = find("abort-in-token")
    assert probe.done.startswith("Twelve tokens; stop after 10, 50 and 97 % of the next one;")
    assert (probe.patches, probe.model) == (("0002",), "qwen35")
    refused = Known(
        Behaviour.WRONG,
        Behaviour.REFUSED,
        "the decode returned 2, 0 tokens left; the next decode returned -2",
        ("0002",),
    )
    exact = Known(Behaviour.WRONG, Behaviour.EXACT, "the decode returned 2, 0 tokens left", ("0002",))
    assert probe.known == {"qwen35": refused, "jamba": refused, "lfm2": refused, "mamba": exact}
