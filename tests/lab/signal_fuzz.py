"""Signal campaigns: real timer signals that raise KeyboardInterrupt at any moment of a request.

``python -m tests.lab.signal_fuzz --seconds 300 [--count 20000] [--seed 1] [--arch qwen35]``

A timer interrupts requests, restores, drafts and disk writes. The next request of the same object must answer
as a fresh stock context does, and now and then that of a new object on the same folder. With several slots
other threads ask meanwhile, and their answers must not change. A round that takes a minute prints every
thread's stack and ends the process.
"""

from __future__ import annotations

import faulthandler
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from tests.lab.campaign import main
from tests.lab.differential import shortfall
from tests.lab.integrity import check_integrity
from tests.lab.interrupt_fuzz import interrupted_after
from tests.lab.reference import Reference, Setting

ARCHITECTURES = ("qwen35", "mamba", "gemma3", "llama")
"""A hybrid, a recurrent, a windowed and a plain memory."""

MODES = ("plain", "drafts", "disk", "slots", "parallel")
SETTING = Setting("window", {"swa_full": False, "n_batch": 64, "n_ubatch": 32})
TOKENS = 12
OTHERS = 2
"""Threads that ask while one is interrupted, in the mode of several slots."""

PAUSES, PAUSE_SECONDS = 0.2, 0.3
"""Share of a thread's requests before which it pauses, and the longest pause."""

RAM = 3 << 20
"""Small enough that entries come and go."""

PER_OBJECT = 50
"""Rounds after which a new `Llama` takes over, on the same folder."""

STUCK_SECONDS = 60


def prompts(rng: random.Random) -> list[list[int]]:
    """Chats that share beginnings and repeat themselves, so that restores, cuts and drafts take place."""
    phrase = [rng.randrange(1, 200) for _ in range(5)]
    first, second = ([rng.randrange(1, 200) for _ in range(rng.randrange(40, 120))] for _ in range(2))
    tail = phrase * 3 + phrase[:1]
    mixed = [first[: rng.randrange(10, 40)] + second, second[: rng.randrange(10, 40)] + first]
    return [chat + tail for chat in (first, second, *mixed)]


@dataclass
class Others:
    """Threads that ask for the same chats until the block ends, and note wrong answers."""

    llm: Any
    chats: list[list[int]]
    wanted: list[list[int]]
    seed: int
    asked: int = 0
    wrong: list[tuple[int, list[int]]] = field(default_factory=list)
    """(which chat, the answer)."""
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def asking(self, threads: int) -> Iterator[None]:
        """Run `threads` threads that ask while the body runs."""
        with ThreadPoolExecutor(threads or 1) as pool:
            asking = [pool.submit(self._ask, self.seed + i) for i in range(threads)]
            try:
                yield
            finally:
                self.over.set()
            for each in asking:
                each.result(STUCK_SECONDS)

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.over.is_set():
            if rng.random() < PAUSES:
                self.over.wait(rng.random() * PAUSE_SECONDS)
            index = rng.randrange(len(self.chats))
            answer = _ask(self.llm, self.chats[index])
            self.asked += 1
            if answer != self.wanted[index]:
                self.wrong.append((index, answer))


def run(model: Path, mode: str, seed: int, count: int, until: float) -> dict[str, int]:
    """At most `count` rounds, until the clock shows `until` (`time.monotonic`); requests by kind.

    Raises:
        Mismatch: an answer after an interrupt, or beside it, is not that of a fresh context.
    """
    rng = random.Random(seed)
    rounds = interrupted = beside = 0
    chats = prompts(rng)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        closing(Reference(model, SETTING)) as reference,
    ):
        wanted = [_fresh(model, chat) for chat in chats]
        usual = 0.02
        try:
            while rounds < count and time.monotonic() < until:
                cache = PromptCache(RAM, folder if mode == "disk" else None)
                draft = LlamaPromptLookupDecoding(num_pred_tokens=6, max_ngram_size=2)
                slots = {"n_parallel": 1 + OTHERS}
                more = {"drafts": {"draft_model": draft}, "slots": slots, "parallel": slots}.get(mode, {})
                with closing(SETTING.open(Llama, model, prompt_cache=cache, **more)) as llm:
                    others = Others(llm, chats, wanted, rng.randrange(1 << 30))
                    with others.asking(OTHERS if mode == "parallel" else 0):
                        for _ in range(min(PER_OBJECT, count - rounds)):
                            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
                            chat, clock = rng.choice(chats), time.perf_counter()
                            hit = interrupted_after(rng.random() * 1.5 * usual, partial(_ask, llm, chat))
                            if not hit:
                                usual = 0.8 * usual + 0.2 * (time.perf_counter() - clock)
                            interrupted += hit
                            rounds += 1
                            index = rng.randrange(len(chats))
                            answer = _ask(llm, chats[index])
                            if answer != wanted[index]:
                                shortfall(reference, chats[index], answer)
                            if mode != "parallel":
                                check_integrity(cache)
                    check_integrity(cache)
                    beside += others.asked
                    for index, answer in others.wrong:
                        shortfall(reference, chats[index], answer)
        finally:
            faulthandler.cancel_dump_traceback_later()
    return {"rounds": rounds, "interrupted": interrupted, "beside": beside}


def _ask(llm: Any, prompt: list[int]) -> list[int]:
    with closing(llm.generate(prompt, temp=0.0)) as stream:
        return list(islice(stream, TOKENS))


def _fresh(model: Path, prompt: list[int]) -> list[int]:
    with closing(SETTING.open(llama_cpp.Llama, model)) as stock:
        return _ask(stock, prompt)


if __name__ == "__main__":
    main(run, ARCHITECTURES, MODES, window=16)
