"""Batches that hold tokens of several sequences."""

from __future__ import annotations

from llamahybrid.harness.hazards.case import probe, probes_in
from llamahybrid.harness.hazards.context import Context
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.harness.hazards.outcome import Outcome, all_sound, went_on

_SITE = "models/plamo2.cpp: llama_model_plamo2::graph::build_plamo2_mamba_layer"
_SEVERAL = {"n_seq_max": 6, "kv_unified": True}


def _together(context: Context, length: int, seqs: tuple[int, ...]) -> None:
    """Decode the next token of each of these sequences, of `length` tokens each, in one batch."""
    status = context.decode((context.tested.token(length, seq), length, (seq,)) for seq in seqs)
    if status:
        raise RuntimeError(f"llama_decode returned {status} for a batch of {len(seqs)} sequences")


@probe(
    "A batch of several sequences that do not begin at the first state",
    site=_SITE,
    sound="goes on with each as alone",
)
def batch_of_several(tested: ModelUnderTest) -> Outcome:
    """Three sequences of twelve tokens; two steps of the last two in one batch each; go on with all three."""
    context = tested.context(**_SEVERAL).filled(dict.fromkeys(range(3), 12))
    for length in (12, 13):
        _together(context, length, (1, 2))
    ends = {0: 12, 1: 14, 2: 14}
    return all_sound(
        went_on(context.goes_on(end, seq, text=seq), "decoded in one batch") for seq, end in ends.items()
    )


PROBES = probes_in(vars())
