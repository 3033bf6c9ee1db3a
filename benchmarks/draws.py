"""Losses of the checkpoint schedule: tokens decoded over the least possible, conversations of random sizes.

Draws of `benchmarks.conversations` on a Qwen3.5-architecture model of about 100M parameters, by llama.cpp's
own counters. Raw tokens; requests that have nothing to reuse are left out, the first divergence counts.
`--tiny` runs them on a model of 7 MB with the costs of the large one (`--costs`): the same decisions in far
less time. `--simulate` plays them with tokens alone. `--longest` caps first prompts; say so with figures.
Run: python -m benchmarks.draws [--draws N] [--first SEED] [--longest N] [--tiny | --simulate] [--json FILE]
Exits with 1 where the bounds are missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.conversations import Draw, Words, named, ratio
from benchmarks.figures import machine
from llamahybrid import Llama
from llamahybrid.harness.conversation import Conversation
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.prompt_cache import Costs, PromptCache
from tests.lab.costs import RealCosts, measure_with
from tests.lab.in_process import Record, converse
from tests.lab.pretend import Ours, PretendSpeech, Scale, play
from tests.lab.quiet import silence
from tests.lab.server_rules import Sizes

# isort: split
from rich.console import Console
from rich.progress import track
from rich.table import Table

from llamahybrid.tiny import make

MEAN, MOST = 1.06, 1.15
NAMED = 1.06
PARAMETERS = 100_000_000
COSTS = (18.6e-3, 4.4e-3, 1e-3)
"""Seconds of a token, of a prompt's token and of a snapshot: that model on one core of a busy machine."""
RAM = 4 << 30
CONTEXT_ROOM = 1.35
"""Contexts are so much longer than the longest first prompt, and `EXTRA` tokens more: conversations grow."""
EXTRA = 10_000

Start = Callable[[Words], Conversation]
Runner = Callable[[Start], Sequence[Record]]


def on_model(path: Path, options: dict[str, Any], told: Costs | None) -> Runner:
    """Runs conversations on fresh objects of one model; `told`: costs it is to believe."""

    def run(start: Start) -> Sequence[Record]:
        with closing(Llama(str(path), verbose=False, prompt_cache=PromptCache(RAM), **options)) as llm:
            if told is not None and llm.runner is not None:
                measure_with(llm.runner, RealCosts(llm.n_batch, told))
            return converse(llm, start(Speech(llm, marked=False)))

    return run


def simulated(told: Costs) -> Runner:
    """Plays conversations with tokens alone."""
    scale = Scale(Sizes(snapshot=1536 << 10, token=4 << 10), told, 256, 8)

    def run(start: Start) -> Sequence[Record]:
        speech = PretendSpeech(marked=False)
        return list(play(start(speech), speech, Ours(scale, RAM)))

    return run


def table(found: dict[str, list[tuple[float, int]]], title: str) -> Table:
    out = Table("shape", "draws", "mean", "95 %", "worst", "its seed", title=title)
    every = [each for some in found.values() for each in some]
    for name, some in [*found.items(), ("all", every)]:
        ratios = sorted(r for r, _ in some)
        worst, seed = max(some)
        mean, most = f"{fmean(ratios):.4f}", f"{percentile(ratios):.3f}"
        out.add_row(name, str(len(some)), mean, most, f"{worst:.3f}", str(seed))
    return out


def percentile(ratios: Sequence[float], share: float = 0.95) -> float:
    return ratios[min(len(ratios) - 1, int(share * len(ratios)))]


def main(run: Runner, seeds: range, longest: int, title: str, out: Path | None) -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    found: dict[str, list[tuple[float, int]]] = {}
    for seed in track(seeds, console=Console(stderr=True)):
        draw = Draw(seed, longest)
        value = ratio(run(draw.start))
        found.setdefault(draw.shape.__name__, []).append((value, seed))
        console.print(f"[dim]{seed} {draw.shape.__name__} {value:.3f}[/]")
    cases = {name: ratio(run(start)) for name, start in named()}
    console.print(table(found, title))
    for name, value in cases.items():
        console.print(f"{name}: {value:.3f}")
    console.print(f"seeds {seeds.start} to {seeds.stop - 1}. {machine()}", style="dim")
    ratios = sorted(r for some in found.values() for r, _ in some)
    if out is not None:
        cells = {name: [{"seed": s, "ratio": r} for r, s in some] for name, some in found.items()}
        out.write_text(json.dumps({"machine": machine(), "draws": cells, "named": cases}, indent=1) + "\n")
    holds = fmean(ratios) <= MEAN and percentile(ratios) <= MOST and max(cases.values()) <= NAMED
    return 0 if holds else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=10_000, help="seeds below 10,000 chose the rules")
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--costs", type=float, nargs=3, default=COSTS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    token, prefill, snapshot = arguments.costs
    told = Costs(token, prefill, snapshot, snapshot)
    seeds = range(arguments.first, arguments.first + arguments.draws)
    longest = arguments.longest
    if arguments.simulate:
        sys.exit(main(simulated(told), seeds, longest, "played with tokens alone", arguments.json))
    silence()
    with tempfile.TemporaryDirectory() as folder:
        context = int(CONTEXT_ROOM * longest) + EXTRA
        options = {"n_ctx": context}
        if arguments.threads:
            options |= {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
        if arguments.tiny:
            model = make("qwen35", Path(folder) / "model.gguf", context=context)
        else:
            model = make("qwen35", Path(folder) / "model.gguf", params=PARAMETERS, context=context)
        run = on_model(model, options, told if arguments.tiny else None)
        title = f"qwen35, {model.stat().st_size / 2e6:.0f}M parameters, prompts up to {longest:,} tokens"
        sys.exit(main(run, seeds, longest, title, arguments.json))
