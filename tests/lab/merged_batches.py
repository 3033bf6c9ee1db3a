"""What batches of several sequences differ by from batches of one, in a bare llama_decode loop.

``python -m tests.lab.merged_batches [--seed 1] [--arch qwen35]``

Prompts are decoded one after the other into one unified context, then one token of some in every batch; the
logits are held against those of contexts that hold one sequence and decode it alone. That is where the
tolerance of ``tests.lab.parallel_fuzz`` comes from: nothing of this package runs here. Each setting is tried
in a process of its own, since the library ends it where an architecture cannot do this.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llamahybrid import tiny
from tests.lab.fuzz import generative
from tests.lab.reference import Logits, Setting, difference, output_row, settings_for

SEQUENCES, STEPS, ROUNDS = 4, 16, 4


class Loop:
    """A context of its own and the batches that are decoded in it."""

    def __init__(self, llama: Any, sequences: int) -> None:
        import llama_cpp

        params = llama.context_params
        params.n_seq_max, params.kv_unified = sequences + 1, True
        self._api, self._params = llama_cpp, params
        self.ctx = llama_cpp.llama_init_from_model(llama.model, params)
        self._batch = llama_cpp.llama_batch_init(int(params.n_batch), 0, 1)
        self._vocab = llama.n_vocab()

    def decode(self, tokens: Sequence[tuple[int, int, int]]) -> list[Logits]:
        """One batch of (token, position, sequence); the logits after each."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        result = self._api.llama_decode(self.ctx, batch)
        if result:
            raise RuntimeError(f"llama_decode returned {result}")
        return [output_row(self.ctx, i, self._vocab) for i in range(len(tokens))]

    def prompt(self, tokens: Sequence[int], sequence: int) -> None:
        """Decode a prompt in batches of n_batch."""
        step = int(self._params.n_batch)
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            self.decode([(token, start + i, sequence) for i, token in enumerate(part)])

    def close(self) -> None:
        """Free the context."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self.ctx)


def apart(model: Path, setting: Setting, seed: int) -> float:
    """The largest difference seen, as a share of the logits' range."""
    import llama_cpp

    rng, worst = random.Random(seed), 0.0
    llama = setting.open(llama_cpp.Llama, model, n_ctx=1536)
    for _ in range(ROUNDS):
        prompts = [[rng.randrange(1, 200) for _ in range(rng.randrange(5, 150))] for _ in range(SEQUENCES)]
        answers = [[rng.randrange(1, 200) for _ in range(STEPS)] for _ in range(SEQUENCES)]
        together = Loop(llama, SEQUENCES)
        for sequence, prompt in enumerate(prompts):
            together.prompt(prompt, sequence)
        rows: list[list[Logits]] = [[] for _ in prompts]
        while any(len(row) < STEPS for row in rows):
            left = [s for s in range(SEQUENCES) if len(rows[s]) < STEPS]
            step = rng.sample(left, rng.randrange(1, len(left) + 1))
            batch = [(answers[s][len(rows[s])], len(prompts[s]) + len(rows[s]), s) for s in step]
            for s, row in zip(step, together.decode(batch), strict=True):
                rows[s].append(row)
        together.close()
        for prompt, answer, merged in zip(prompts, answers, rows, strict=True):
            alone = Loop(llama, 1)
            alone.prompt(prompt, 0)
            for i, token in enumerate(answer):
                (row,) = alone.decode([(token, len(prompt) + i, 0)])
                worst = max(worst, difference(merged[i], row))
            alone.close()
    llama.close()
    return worst


def main(
    seed: Annotated[int, typer.Option(help="Seed of prompts and answers.")] = 0,
    arch: Annotated[list[str] | None, typer.Option(help="Only this architecture; may be repeated.")] = None,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """A table of largest differences, by architecture and setting."""
    if one:
        model, _, name = one.partition("=")
        (setting,) = (s for s in settings_for(Path(model)) if s.name == name)
        print(apart(Path(model), setting, seed))
        return
    table = Table("architecture", "setting", "largest difference", "tolerance")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        for name in arch or generative():
            model_path = tiny.make(name, Path(folder, f"{name}.gguf"), window=16)
            for setting in settings_for(model_path):
                if setting.name in ("all logits", "odd context"):
                    continue
                trial = [sys.executable, "-m", "tests.lab.merged_batches", "--seed", str(seed)]
                trial += ["--one", f"{model_path}={setting.name}"]
                done = subprocess.run(trial, capture_output=True, text=True)
                found = f"{float(done.stdout):.1e}" if done.returncode == 0 else done.stderr.strip()[-150:]
                table.add_row(name, setting.name, found, f"{setting.tolerance:.0e}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
