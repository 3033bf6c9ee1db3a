"""Campaigns on requests in small: a counted number of histories, and that each sees what it is there to see.

The other architectures, and many more histories, are `make test-all` and `make fuzz`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab import parallel_fuzz, signal_fuzz
from tests.lab.differential import Mismatch, shortfall
from tests.lab.parallel_fuzz import Outcome
from tests.lab.parallel_talk import Said
from tests.lab.reference import Reference

TinyModel = Callable[..., Path]


def more(*archs: str) -> list[Any]:
    """qwen35, and others in `make test-all`."""
    return ["qwen35", *(pytest.param(arch, marks=pytest.mark.full) for arch in archs)]


def soon() -> float:
    """Far later than a few histories take anywhere."""
    return time.monotonic() + 500


# -- several conversations at once -------------------------------------------------------------------


def play(model: Path, count: int, seed: int = 3) -> Outcome:
    outcome = Outcome()
    parallel_fuzz.run(model, seed, count, soon(), outcome)
    return outcome


@pytest.mark.patched
@pytest.mark.parametrize("arch", more("mamba", "gemma3", "llama", "deepseek4"))
def test_conversations_have_the_logits_of_a_fresh_context(tiny_model: TinyModel, arch: str) -> None:
    """Threads may run one after another on a busy machine: more histories, until some shared a batch."""
    model, outcome = tiny_model(arch, window=16), Outcome()
    seed = parallel_fuzz.run(model, 5, 3, soon(), outcome)
    assert outcome.histories == 3
    assert outcome.verdict.requests > 10
    while not outcome.count["steps"]:
        assert outcome.histories < 100
        seed = parallel_fuzz.run(model, seed, 1, soon(), outcome)
    assert outcome.count["rows"] > outcome.count["steps"]
    assert outcome.count["models"] > outcome.histories, "some share a prompt cache"


def mix_up_rows(patch: pytest.MonkeyPatch) -> None:
    def watch(self: Said, ids: Any, scores: Any) -> Any:
        self.seen.append(np.roll(np.array(scores, dtype=np.float32), 1))
        return scores

    patch.setattr(Said, "watch", watch)


def mix_up_ids(patch: pytest.MonkeyPatch) -> None:
    watch = Said.watch
    patch.setattr(Said, "watch", lambda self, ids, scores: watch(self, ids[:-1], scores))


def take_all_salts_for_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("llamahybrid.llama.digest", lambda salt: bytes(16))


def leave_a_stream_behind(patch: pytest.MonkeyPatch) -> None:
    set_wait, kept = parallel_fuzz.set_wait, list[Any]()

    def first(llm: Any, wait: bool | float) -> None:
        kept.append(llm.generate([5, 6, 7]))
        thread = threading.Thread(target=next, args=kept)
        thread.start()
        thread.join()
        set_wait(llm, wait)

    patch.setattr(parallel_fuzz, "set_wait", first)


@pytest.mark.parametrize(
    ("plant", "told", "count"),
    [
        (mix_up_rows, "of the range apart", 1),
        (mix_up_ids, "upstream's ids", 1),
        (take_all_salts_for_one, "were ever asked", 200),
        (leave_a_stream_behind, "left behind", 1),
    ],
)
def test_fault_of_several_conversations_is_noticed(
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    told: str,
    count: int,
) -> None:
    plant(monkeypatch)
    with pytest.raises(Mismatch, match=told):
        play(tiny_model("llama", window=16), count)


def test_answers_below_the_best_are_noticed(tiny_model: TinyModel) -> None:
    reference = Reference(tiny_model("qwen35"), signal_fuzz.SETTING)
    try:
        prompt = list(range(10, 60))
        best = int(reference.logits(prompt)[-1].argmax())
        assert shortfall(reference, prompt, [best]) == 0.0
        with pytest.raises(Mismatch):
            shortfall(reference, prompt, [(best + 7) % 200])
    finally:
        reference.close()


# -- interrupts --------------------------------------------------------------------------


@pytest.mark.xdist_group("serial")
@pytest.mark.parametrize("arch", more(*(arch for arch in signal_fuzz.ARCHITECTURES if arch != "qwen35")))
def test_timer_signals_at_any_moment(arch: str) -> None:
    """In a process of its own: the test runner has a timer, too."""
    campaign = [sys.executable, "-m", "tests.lab.signal_fuzz", "--seconds", "500", "--seed", "7"]
    done = subprocess.run(
        [*campaign, "--count", "6", "--arch", arch], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if arch in line]
    assert [row[5] for row in rows] == ["6"] * len(signal_fuzz.MODES)
