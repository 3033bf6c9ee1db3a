"""What a probe says of itself: what is done, what is known of it, and on which models."""

from __future__ import annotations

from llamahybrid.harness.hazards.case import GEMMA3, LLAMA, QWEN35, Model, on, probe, probes_in
from llamahybrid.harness.hazards.outcome import Outcome, Verdict, wrong


def test_a_probe_knows_its_models_and_says_what_is_done() -> None:
    @probe(
        "title",
        site="x.cpp: f",
        sound="refuses",
        verdicts=(Verdict.DIED, Verdict.REFUSED),
        says="no",
        also=on(Verdict.WRONG, "jamba", LLAMA),
        otherwise={LLAMA: (Verdict.EXACT, "yes")},
    )
    def what_is_done(bench: object) -> Outcome:
        """Do this,
        then that.
        """
        return wrong("")

    made = what_is_done
    assert (made.id, made.stock, made.patched) == ("what-is-done", Verdict.DIED, Verdict.REFUSED)
    assert probes_in(locals()) == (made, made)
    assert made.done == "Do this, then that."
    assert made.known == {QWEN35: Verdict.DIED, Model("jamba"): Verdict.WRONG, LLAMA: Verdict.WRONG}
    assert [made.mended(model) for model in (QWEN35, LLAMA)] == [
        (Verdict.REFUSED, "no"),
        (Verdict.EXACT, "yes"),
    ]


def test_a_models_name_tells_its_sizes() -> None:
    assert [model.name for model in (LLAMA, GEMMA3, Model("qwen35", embd=192))] == [
        "llama",
        "gemma3-window16",
        "qwen35-embd192",
    ]
