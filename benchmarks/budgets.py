"""Oracle ratio over byte budgets at the real proportions of Qwen3.6-27B.

150 MiB a snapshot and 64 KiB of attention KV a token; state is played by tokens, all bytes divided by 64.
Each workload has a cache of its own, or all share one and take turns ("side by side"). "mid-generation" has
no message starts where its histories diverge; it is measured, but no part of the means.
tests/campaigns/test_pretend.py has the bounds.
Run: python -m benchmarks.budgets
Writes benchmarks/results/budgets.json and prints its table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date

from rich.console import Console
from rich.progress import track

from benchmarks.figures import GIB, RESULTS, budgets
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.multi_user import CROWDS
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, long_prompt, mid_generation
from tests.lab.pretend import QWEN36_27B, Ours, PretendSpeech, interleaved

ALONE = tuple(w for w in (*TOKEN_WORKLOADS, *CROWDS) if w.start is not long_prompt)
TOGETHER = [w for w in ALONE if w.start is not mid_generation]
KINDS: Mapping[str, Mapping[str, Sequence[Workload]]] = {
    "templates": {w.name: [w] for w in ALONE},
    "side by side": {"side by side": TOGETHER},
}
"""Workloads that share a cache, by name."""


def ratios(groups: Mapping[str, Sequence[Workload]], n_bytes: int) -> dict[str, float]:
    """Decoded over least of each group on a fresh cache; the cold requests of one workload are left out."""
    found = {}
    for name, group in groups.items():
        speech, warm = PretendSpeech(marked=True), group[0].measured_from if len(group) == 1 else 0
        records = list(interleaved([w.start for w in group], speech, Ours(QWEN36_27B, n_bytes)))
        found[name] = sum(r.decoded for r in records[warm:]) / sum(least_decodes(records)[warm:])
    return found


def main() -> None:
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
    for gib in track(GIB, console=Console(stderr=True)):
        for kind, groups in KINDS.items():
            found[kind][gib] = ratios(groups, int(gib) << 30)
    text = json.dumps({"made": date.today().isoformat(), **found}, indent=1)
    (RESULTS / "budgets.json").write_text(f"{text}\n", encoding="utf-8")
    print(budgets())


if __name__ == "__main__":
    main()
