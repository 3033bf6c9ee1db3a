"""The catalogue: each probe has a description, known verdicts, and the patches that fix it."""

from __future__ import annotations

import pytest

from llamahybrid.engine import sdist, series
from llamahybrid.harness.hazards import case, catalogue
from llamahybrid.harness.hazards.case import GEMMA3, LLAMA, QWEN35, Model, on, probes_in
from llamahybrid.harness.hazards.catalogue import PROBES, find
from llamahybrid.harness.hazards.outcome import Outcome, Verdict, wrong


def test_every_probe_is_listed_once_and_described() -> None:
    families = [value.PROBES for value in vars(catalogue).values() if hasattr(value, "PROBES")]
    assert sum(map(len, families)) == len({probe.id for probe in PROBES}) == len(PROBES)
    assert all(probe.title and probe.done and probe.site and probe.sound for probe in PROBES)


def test_probe_is_found_by_its_id() -> None:
    assert [find(probe.id) for probe in PROBES] == list(PROBES)
    with pytest.raises(ValueError, match="no probe called nonsense; there are: rollback-one-batch, "):
        find("nonsense")


def test_faults_of_stock_have_a_patch_that_fixes_them() -> None:
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


def test_catalogue_has_faults_for_each_patch() -> None:
    verdicts = [probe.stock for probe in PROBES]
    assert verdicts.count(Verdict.WRONG) >= 15
    assert verdicts.count(Verdict.DIED) >= 8
    assert {number for probe in PROBES for number in probe.patches} >= {
        f"{n:04}" for n in (*range(1, 14), 15, 17, 18, 20, 25, 26, 27, 28, 30)
    }


def test_probe_is_made_of_a_function() -> None:
    @case.probe(
        "title",
        site="x.cpp: f",
        sound="refuses",
        verdicts=(Verdict.DIED, Verdict.REFUSED),
        says="no",
        also=on(Verdict.WRONG, "jamba", LLAMA),
        otherwise={LLAMA: (Verdict.EXACT, "yes")},
    )
    def do_this(tested: object) -> Outcome:
        """Do this,
        then that.
        """
        return wrong("")

    made = do_this
    assert (made.id, made.stock, made.patched) == ("do-this", Verdict.DIED, Verdict.REFUSED)
    assert probes_in(locals()) == (made, made)
    assert made.done == "Do this, then that."
    assert made.known == {QWEN35: Verdict.DIED, Model("jamba"): Verdict.WRONG, LLAMA: Verdict.WRONG}
    assert [made.mended(model) for model in (QWEN35, LLAMA)] == [
        (Verdict.REFUSED, "no"),
        (Verdict.EXACT, "yes"),
    ]


def test_model_name_has_its_sizes() -> None:
    assert [model.name for model in (LLAMA, GEMMA3, Model("qwen35", embd=192))] == [
        "llama",
        "gemma3-window16",
        "qwen35-embd192",
    ]
