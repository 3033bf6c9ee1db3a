"""Cancel campaigns: requests cancelled from another thread at random moments, and what comes after them.

``python -m tests.lab.cancel_fuzz --seconds 300 [--count 5000] [--seed 1] [--arch qwen35]``

After each cancel the next request must answer as a fresh stock context would, and must not be stopped by a
cancel that came too late or names the request before it. Threads and memory are counted at both ends.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import typer
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid.client.handle import RequestHandle
from llamahybrid.errors import RequestCancelled
from llamahybrid.llama import Llama
from tests.lab.campaign import Archs, Count, Seconds, Seed, sweep
from tests.lab.differential import Mismatch
from tests.lab.history import Ask, Chat, random_history
from tests.lab.reference import Logits, Reference, Setting, difference, output_row
from tests.lab.soak import cached_bytes, resident_bytes

ARCHITECTURES = ("qwen35", "jamba", "mamba", "lfm2", "gemma3", "llama")
SETTINGS = (
    Setting("one batch"),
    Setting("small batches, window", {"n_batch": 32, "n_ubatch": 32, "swa_full": False}),
    Setting("rollback planes", {"num_pred_tokens": 4}),
)
NAMED = {setting.name: setting for setting in SETTINGS}
LONGEST = 400


@dataclass
class Outcome:
    """What a campaign on one model and setting showed."""

    ends: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended: cancelled in the prompt, in the answer, or not (the cancel was late)."""
    worst: float = 0.0
    threads: int = 0
    """Threads more at the end than at the start."""
    grown_bytes: int = 0
    """Memory outside the prompt cache, end less start."""


def prompts(seed: int, reference: Reference) -> Iterator[tuple[list[int], int]]:
    """Endless prompts of a chat that is appended to, stripped, edited and left, with tokens to take."""
    chat = Chat()
    for number in itertools.count(seed):
        for operation in random_history(number, length=12, longest=LONGEST).operations:
            if not isinstance(operation, Ask):
                continue
            tokens = operation.prompt.tokens(chat, reference.vocabulary)[-LONGEST:] or [1]
            chat.asked(tokens, [])
            yield tokens, operation.take


def cancelled_at(llm: Llama, prompt: list[int], take: int, delay: float) -> tuple[str, float]:
    """Ask and cancel after `delay` seconds: how it ended, and how long it took."""
    started, taken, end = time.perf_counter(), 0, "not: too late"
    canceller = threading.Timer(delay, llm.cancel)
    canceller.start()
    with closing(llm.generate(prompt, temp=0.0)) as stream:
        try:
            for _ in itertools.islice(stream, take):
                taken += 1
        except RequestCancelled:
            end = "in the answer" if taken else "in the prompt"
        elapsed = time.perf_counter() - started
    canceller.join()
    return end, elapsed


def run(model: Path, setting: Setting, seed: int, count: int, until: float) -> Outcome:
    """Cancel `count` requests, or as many as fit before the clock shows `until` (`time.monotonic`).

    Raises:
        Mismatch: the answer after a cancel is wrong, or a request was stopped that nobody cancelled.
    """
    rng, outcome = random.Random(seed), Outcome()
    arguments = dict(setting.arguments)
    draft = arguments.pop("num_pred_tokens", 0)
    plain = Setting(setting.name, arguments)
    more = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=draft)} if draft else {}
    with closing(Reference(model, plain)) as reference, closing(plain.open(Llama, model, **more)) as llm:
        usual, threads, before = 0.01, threading.active_count(), 0
        asked = prompts(seed, reference)
        for number in range(count):
            if time.monotonic() > until:
                break
            prompt, take = next(asked)
            with llm.request() as stale:
                end, elapsed = cancelled_at(llm, prompt, take, rng.random() * usual)
            if end.startswith("not"):
                usual = 0.8 * usual + 0.2 * elapsed
            outcome.ends[end] += 1
            prompt = prompt if rng.random() < 0.5 else next(asked)[0]
            seen = _first_logits(llm, prompt, stale)
            apart = difference(seen, reference.logits(prompt)[0])
            outcome.worst = max(outcome.worst, apart)
            if not apart <= setting.tolerance:
                raise Mismatch(
                    f"{model.name}, {setting.name}, seed {seed}, request {number}, cancelled {end}: "
                    f"the next request's logits are {apart:.1e} of the range apart"
                )
            llm.cancel()  # nothing runs
            if number == 0:
                threads = threading.active_count()  # with the one that decodes
            if number == count // 4:
                before = resident_bytes() - cached_bytes(llm)
        outcome.threads = threading.active_count() - threads
        outcome.grown_bytes = resident_bytes() - cached_bytes(llm) - before if before else 0
    return outcome


def _first_logits(llm: Llama, prompt: list[int], stale: RequestHandle) -> Logits:
    """Logits at the prompt's end, while an older request is cancelled once more."""
    stream = llm.generate(prompt, temp=0.0)
    with closing(stream):
        try:
            next(stream)
            logits = output_row(llm.ctx, -1, llm.n_vocab())
            stale.cancel()
            next(stream)
        except RequestCancelled as error:
            raise Mismatch("a request was stopped that nobody cancelled") from error
    return logits


def main(seconds: Seconds = 60, count: Count = 5000, seed: Seed = 0, arch: Archs = None) -> None:
    """Requests cancelled at random moments, for a bounded time."""
    archs = arch or ARCHITECTURES
    each = -(-count // (len(archs) * len(SETTINGS)))

    def play(model: Path, way: str, number: int, until: float) -> tuple[object, ...]:
        outcome = run(model, NAMED[way], seed + number, each, until)
        ends = (outcome.ends[end] for end in ("in the prompt", "in the answer", "not: too late"))
        grown = f"{outcome.grown_bytes / 2**20:+.1f}"
        return (way, *ends, f"{outcome.worst:.1e}", f"{outcome.threads:+}", grown)

    columns = "setting, in the prompt, in the answer, too late, worst difference, threads, MiB"
    sweep(play, archs, columns, seconds, seed, tuple(NAMED))


if __name__ == "__main__":
    typer.run(main)
