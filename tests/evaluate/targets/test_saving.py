"""What a save takes is told beside a memcpy of the same round; what cannot be told is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.evaluate.targets import saving
from llamahybrid.evaluate.targets.base import ModelFile, Saving, Shape
from llamahybrid.evaluate.targets.choice import target

PROMPT = [(7 * i + 3) % 200 for i in range(200)]


def test_each_part_is_timed_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now, copied = [0.0], []

    def takes(seconds: float) -> int:
        now[0] += seconds
        return 64

    def copy(to: Any, source: Any) -> None:
        copied.append((to.nbytes, source.nbytes))
        takes(1)

    monkeypatch.setattr(saving.np, "copyto", copy)
    found = saving.timed(lambda: takes(3), lambda: takes(5) and None, lambda: now[0])
    assert found == Saving(bytes=64, save=3, restore=5, memcpy=1)
    assert set(copied) == {(64, 64)}


@pytest.mark.parametrize("arch", ["qwen35", "llama", "mamba"])
def test_whatever_keeps_states_tells_what_that_takes(tiny_model: Callable[..., Path], arch: str) -> None:
    model, sizes = ModelFile("tiny", tiny_model(arch), {"n_threads": 1}), {}
    for kind in ("ours", "stock", "stock+ram", "stock+disk"):
        on = target(kind)
        try:
            with on.open(model, Shape(512)) as session:
                found, shorter = session.saving(PROMPT), session.saving(PROMPT[:100])
        finally:
            on.close()
        assert found is not None
        assert shorter is not None
        assert (shorter.bytes < found.bytes) is (arch != "mamba" or kind != "ours"), "recurrent: one size"
        sizes[kind] = found.bytes
    assert 0 < sizes["ours"] <= sizes["stock"] == sizes["stock+ram"] == sizes["stock+disk"]


def test_a_restore_that_does_not_prove_right_is_said(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Llama(str(tiny_model("qwen35")), n_ctx=512, n_threads=1, verbose=False)) as llm:
        llm.eval(PROMPT)
        assert llm.runner is not None
        live = llm.runner.live
        save, restore = saving._ours(live)
        save()
        monkeypatch.setattr(live.native, "load_partial", lambda _: False)
        with pytest.raises(RuntimeError, match="not restored"):
            restore()


@pytest.mark.parametrize("kind", ["class:mine.py:Mine", "ours"])
def test_what_is_hidden_is_not_guessed(kind: str) -> None:
    llm = SimpleNamespace(reset=lambda: None, eval=lambda tokens: None, runner=None, cache=None)
    assert saving.measured(llm, kind, [1, 2]) is None
