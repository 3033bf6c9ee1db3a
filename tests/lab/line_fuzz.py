"""Interrupts at every line of what touches a context: KeyboardInterrupt between any two of them.

``python -m tests.lab.line_fuzz --seconds 300 [--seed 1] [--arch qwen35]``

Two chats are asked in turn, with drafts, with two slots, and with neither, so that restores, cuts, saves and
decodes take place. Each line that runs is then interrupted at its first and at a later pass; whatever is
asked afterwards must be answered as a fresh stock context does.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeAlias

import llama_cpp
import typer
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from rich.console import Console
from rich.table import Table

import llamahybrid
from llamahybrid import tiny
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from tests.lab.differential import Mismatch
from tests.lab.draft_fuzz import EveryDraft
from tests.lab.quiet import silence
from tests.lab.reference import Reference, Setting
from tests.lab.signal_fuzz import prompts
from tests.lab.thread_fuzz import shortfall

MODES = ("plain", "drafts", "slots")
ARCHITECTURES = ("qwen35", "mamba", "gemma3", "llama")
SETTING = Setting("window", {"swa_full": False, "n_batch": 64, "n_ubatch": 32})
TOKENS = 8
ROOT = Path(llamahybrid.__file__).parent
ROOMS = "request", "memory", "speculation"
FILES = (
    *(file for room in ROOMS for file in ROOT.glob(f"{room}/*.py")),
    ROOT / "llama.py",
)
LATER = 5
"""Each line is interrupted at its first pass and at this one."""

Line: TypeAlias = tuple[str, int]


class Trace:
    """Calls `seen(line)` before each line of `FILES`."""

    def __init__(self, seen: Callable[[Line], None]) -> None:
        self._seen = seen
        self._files = {str(file) for file in FILES}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """For `sys.settrace`."""
        name = frame.f_code.co_filename
        if name not in self._files:
            return None
        if event == "line":
            self._seen((name, frame.f_lineno))
        return self

    def during(self, work: Callable[[], Any]) -> bool:
        """Run `work()` traced; whether a KeyboardInterrupt ended it."""
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


class Sweep:
    """One model whose lines are interrupted."""

    def __init__(self, model: Path, seed: int, mode: str) -> None:
        rng = random.Random(seed)
        self._model = model
        self._chats = prompts(rng)[:3]
        self._wanted = [_ask(SETTING.open(llama_cpp.Llama, model), chat) for chat in self._chats]
        draft = LlamaPromptLookupDecoding(num_pred_tokens=4, max_ngram_size=2)
        self._more = {"drafts": {"draft_model": draft}, "slots": {"n_parallel": 2}}.get(mode, {})
        self.llm = self._open()

    def _open(self) -> Any:
        llm = SETTING.open(Llama, self._model, prompt_cache=PromptCache(3 << 20), **self._more)
        if "draft_model" in self._more:
            llm.drafts.policy = EveryDraft(llm.runner.meter)
        return llm

    def requests(self) -> None:
        """What is interrupted: a chat, another one in its place, and the first one again."""
        for chat in (self._chats[0], self._chats[1], self._chats[0][:-3]):
            _ask(self.llm, chat)

    def lines(self) -> list[Line]:
        """The lines that run, with nothing stored before and with something."""
        found: set[Line] = set()
        trace = Trace(found.add)
        for _ in range(2):
            trace.during(self.requests)
        return sorted(found)

    def interrupt(self, line: Line, passes: int) -> bool:
        """Interrupt a line at one of its passes, then ask every chat; False where it was not passed so often.

        Raises:
            Mismatch: an answer is not that of a fresh context.
        """
        left = [passes]

        def seen(where: Line) -> None:
            if where == line:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt

        hit = Trace(seen).during(self.requests)
        self.llm.requests.gate.seats.patience = 0.05
        for chat, wanted in zip(self._chats, self._wanted, strict=True):
            answer = _ask(self.llm, chat)
            if answer != wanted:
                with closing(Reference(self._model, SETTING)) as reference:
                    try:
                        shortfall(reference, chat, answer)
                    except Mismatch as error:
                        raise Mismatch(f"interrupted at {Path(line[0]).name}:{line[1]}: {error}") from error
        return hit


def _ask(llm: Any, prompt: list[int]) -> list[int]:
    with closing(llm.generate(prompt, temp=0.0)) as stream:
        return list(islice(stream, TOKENS))


def run(model: Path, seed: int, mode: str, until: float, most: int | None = None) -> tuple[int, int]:
    """Interrupt lines, `most` of them drawn at random or all, until the clock shows `until`.

    Returns how many lines there are and how many interrupts were made. Raises Mismatch.
    """
    sweep = Sweep(model, seed, mode)
    with closing(sweep.llm):
        lines = sweep.lines()
        chosen = lines if most is None else random.Random(seed).sample(lines, min(most, len(lines)))
        made = 0
        for line in chosen:
            for passes in (1, LATER):
                if time.monotonic() > until:
                    return len(lines), made
                made += sweep.interrupt(line, passes)
    return len(lines), made


def main(
    seconds: Annotated[float, typer.Option(help="How long at most.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the chats.")] = 0,
    arch: Annotated[list[str] | None, typer.Option(help="Only this architecture; may be repeated.")] = None,
) -> None:
    """An interrupt at each line in turn, for a bounded time."""
    silence()
    console = Console()
    table = Table("architecture", "mode", "lines", "interrupts", title=f"seed {seed}")
    trials = [(name, mode) for name in arch or ARCHITECTURES for mode in MODES]
    start, failure = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, mode) in enumerate(trials):
            model = tiny.make(name, Path(folder, f"{name}.gguf"), window=16)
            try:
                lines, made = run(model, seed, mode, start + seconds * (index + 1) / len(trials))
            except Mismatch as mismatch:
                failure = f"{name}: {mismatch}"
                break
            table.add_row(name, mode, str(lines), str(made))
    console.print(table)
    if failure:
        console.print(failure, style="red", markup=False, highlight=False)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
