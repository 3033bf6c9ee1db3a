"""Prompts, models and helpers for tests of one sequence's memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.capi.gguf import Gguf, Shape
from llamahybrid.prompt_cache.base import Bytes, Logits, Tokens
from tests.conftest import SETTINGS, take

PROMPT = [(7 * i + 1) % 200 for i in range(60)]
LONGER = [*PROMPT, 3, 4, 5]


def ids(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def new(n: int) -> Bytes:
    """The buffer of n bytes that saving asks for."""
    return np.empty(n, dtype=np.uint8)


def sequences(llm: Any) -> list[Any]:
    """The live sequences of a model's context, one for each slot."""
    return list(llm.runner.live.shared.members)


def foreign_decode(llm: Any, tokens: list[int], start: int, seq: int = 0) -> None:
    """`llama_decode` by other code."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index] = token
        batch.pos[index] = start + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = seq
        batch.logits[index] = index == len(tokens) - 1
    result = llama_cpp.llama_decode(llm.ctx, batch)
    llama_cpp.llama_batch_free(batch)
    assert result == 0


def write_lora(path: Path, arch: str, seed: int = 1, scale: float = 2.0) -> Path:
    """Write an adapter of rank 4 on the first layer's `ffn_down`."""
    rng = np.random.default_rng(seed)
    with Gguf() as gguf:
        gguf.set({"general.type": "adapter", "general.architecture": arch, "adapter.type": "lora"})
        gguf.set({"adapter.lora.alpha": 8.0})
        for side, ne in (("a", (128, 4)), ("b", (4, 64))):
            data = rng.standard_normal(ne[0] * ne[1]).astype(np.float32) * np.float32(scale)
            gguf.add(Shape(f"blk.0.ffn_down.weight.lora_{side}", ne), data)
        gguf.write(path)
    return path


def decode(live: Any, tokens: list[int]) -> Logits:
    """Decode in one batch; the logits of its last token."""
    live.decode(ids(tokens), "all")
    live.shared.recount()
    return live.row.logits().copy()


def stock(path: Path, prompt: list[int], **more: Any) -> list[int]:
    """The answer of a fresh stock context."""
    return take(llama_cpp.Llama(str(path), **{**SETTINGS, **more}), prompt)


def named(path: Path | str, **more: Any) -> bytes:
    """The fingerprint of a context of a model."""
    fingerprint: bytes = Llama(str(path), **{**SETTINGS, **more}).runner.live.fingerprint
    return fingerprint


def overwritten(path: Path, other: Path) -> None:
    """The file holds what the other one does."""
    with path.open("r+b") as file:
        file.write(other.read_bytes())


def replaced(path: Path, other: Path) -> None:
    """Another file is in its place."""
    shutil.copy(other, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def wait_for_tick(path: Path) -> None:
    """Return when the file system's clock has ticked since a file was last changed."""
    probe, give_up = path.with_name("tick"), time.monotonic() + 30
    while True:
        probe.write_bytes(b"")
        ticked = probe.stat().st_ctime_ns > path.stat().st_ctime_ns
        probe.unlink()
        if ticked:
            return
        assert time.monotonic() < give_up, "the file system's clock stands still"


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that earlier tests noted of files is known."""
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "user"))


@pytest.fixture
def llm(open_model: Callable[..., Any]) -> Any:
    """A hybrid."""
    return open_model(n_ctx=256)


@pytest.fixture
def live(llm: Any) -> Any:
    """The hybrid's sequence, which holds `PROMPT`."""
    llm.eval(PROMPT)
    return llm.runner.live


@pytest.fixture
def plain(open_model: Callable[..., Any]) -> Any:
    """The live sequence of a model whose memory can be cut anywhere."""
    llm = open_model("gemma3", n_ctx=256)
    llm.eval(PROMPT)
    return llm.runner.live
