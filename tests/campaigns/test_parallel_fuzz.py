"""Several conversations at once: a short run of the campaign."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid.request.batcher import Batcher
from tests.lab import parallel_fuzz
from tests.lab.differential import Mismatch
from tests.lab.merged_batches import Loop, apart
from tests.lab.parallel_fuzz import Outcome
from tests.lab.parallel_talk import Said
from tests.lab.reference import SETTINGS, difference

TinyModel = Callable[..., Path]


def run(model: Path, seed: int, count: int) -> Outcome:
    outcome = Outcome()
    parallel_fuzz.run(model, seed, count, time.monotonic() + 100, outcome)
    return outcome


@pytest.mark.parametrize("arch", ["qwen35", "mamba", "gemma3", "llama", "deepseek4"])
def test_every_conversation_hears_what_a_fresh_context_says(tiny_model: TinyModel, arch: str) -> None:
    outcome = run(tiny_model(arch, window=16), 3, 4)
    assert outcome.histories >= 1
    assert outcome.verdict.requests > 10
    assert outcome.count["rows"] > outcome.count["steps"] > 0


def test_a_wrong_row_is_noticed(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_up(self: Said, ids: Any, scores: Any) -> Any:
        self.seen.append(np.roll(np.array(scores, dtype=np.float32), 1))
        return scores

    monkeypatch.setattr(Said, "watch", mixed_up)
    with pytest.raises(Mismatch, match="of the range apart"):
        run(tiny_model("qwen35", window=16), 3, 1)


def test_upstreams_ids_of_another_request_are_noticed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Said.watch
    monkeypatch.setattr(Said, "watch", lambda self, ids, scores: watch(self, ids[:-1], scores))
    with pytest.raises(Mismatch, match="upstream's ids"):
        run(tiny_model("mamba", window=16), 3, 1)


def test_what_another_salt_has_asked_is_noticed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All salts are taken for one."""
    monkeypatch.setattr("llamahybrid.llama.digest", lambda salt: bytes(16))
    with pytest.raises(Mismatch, match="were ever asked"):
        run(tiny_model("llama", window=16), 3, 20)


def test_what_is_left_behind_is_noticed(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batcher, "leave", lambda self, ticket: None)
    with pytest.raises(Mismatch, match="left behind"):
        run(tiny_model("mamba", window=16), 3, 1)


def test_merged_batches_lie_within_the_tolerance(tiny_model: TinyModel) -> None:
    """Of a bare loop, without anything of ours."""
    for arch in ("qwen35", "gemma3"):
        assert 0 < apart(tiny_model(arch, window=16), SETTINGS[0], 1) <= SETTINGS[0].tolerance


def test_where_others_cells_were_freed_a_row_is_that_of_a_fresh_context(tiny_model: TinyModel) -> None:
    """Of a bare loop, too: in a cache of f16 these rows lie 1e-4 of the range apart."""
    import llama_cpp

    model = tiny_model("glm5-next", window=16)
    default = parallel_fuzz.comparable(model)[0]
    llama = default.open(llama_cpp.Llama, model)
    prompt, rows = list(range(1, 61)), []
    for others in (0, 300):
        loop = Loop(llama, 2)
        loop.prompt([5] * others, 1)
        loop.prompt(prompt, 0)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(loop.ctx), 1, 0, -1)
        rows.append([loop.decode([(token, len(prompt) + i, 0)])[0] for i, token in enumerate(prompt[:8])])
        loop.close()
    llama.close()
    assert max(map(difference, *rows)) <= 1e-5
