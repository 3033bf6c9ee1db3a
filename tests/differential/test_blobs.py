"""Damaged and foreign state in small: `lab.blob_fuzz` finds nothing, and would find something."""

import copy
import dataclasses
import os
import random

import numpy as np
import pytest

from llamahybrid import saved_state as upstream_state
from llamahybrid.memory import paging, restore
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, header_of, open_sealed
from tests.lab import blob_fuzz
from tests.lab.blob_fuzz import Damage, at_the_library, batch, mutated, through_api

PATCHED = os.environ.get("LLAMAHYBRID_TEST_LIB", "")


@pytest.mark.parametrize("arch", blob_fuzz.ARCHITECTURES)
def test_nothing_wrong_is_taken(tiny_model, arch):
    outcomes = through_api(tiny_model(arch), seed=11, count=40)
    assert sum(outcomes.values()) == 40


if PATCHED:  # the stock library dies of such bytes

    @pytest.mark.parametrize("arch", blob_fuzz.ARCHITECTURES)
    def test_the_patched_library_survives_and_changes_nothing_it_refuses(tiny_model, arch, monkeypatch):
        monkeypatch.setenv("LLAMAHYBRID_ENGINE", PATCHED)
        outcomes, failure = batch("native", tiny_model(arch), 12, 100)
        assert failure == ""
        assert outcomes["refused"] > 10


def test_a_mutation_is_never_the_original():
    rng = random.Random(1)
    blob, other = np.arange(200, dtype=np.uint8), np.zeros(150, np.uint8)
    assert not any(np.array_equal(mutated(blob, other, rng), blob) for _ in range(2000))


def test_a_missing_check_is_found(tiny_model, monkeypatch):
    def trusting(record, *, namespace, tokens, start=None):
        return record[HEADER_BYTES:]

    monkeypatch.setattr(restore, "open_sealed", trusting)
    monkeypatch.setattr(paging, "open_sealed", trusting)
    monkeypatch.setattr(
        blob_fuzz, "mutated_bytes", lambda blob, other, rng: np.concatenate([blob[:-4], blob[-4:] ^ 1])
    )
    with pytest.raises(Damage, match="was taken"):
        through_api(tiny_model("mamba"), seed=1, count=40)


@pytest.mark.parametrize("name", [name for name in blob_fuzz.VARIANTS if name != "window"])
def test_a_missing_look_at_the_owner_is_found(tiny_model, monkeypatch, name):
    def anybodys(record, *, namespace, tokens, start=None):
        owner = header_of(record[:HEADER_BYTES].tobytes()).namespace
        return open_sealed(record, namespace=owner, tokens=tokens, start=start)

    monkeypatch.setattr(restore, "open_sealed", anybodys)
    monkeypatch.setattr(paging, "open_sealed", anybodys)
    seed = list(blob_fuzz.VARIANTS).index(name)
    with pytest.raises(Damage, match=r"was taken|other logits"):
        through_api(tiny_model("qwen35"), seed, count=100)


@pytest.mark.parametrize("left_out", ["tokens", "logits"])
def test_a_seal_that_leaves_something_out_is_found(tiny_model, monkeypatch, left_out):
    whole = upstream_state._checksum

    def partial(native, tokens, logits):
        return whole(native, tokens[:0] if left_out == "tokens" else tokens, None)

    monkeypatch.setattr(upstream_state, "_checksum", partial)
    monkeypatch.setattr(blob_fuzz, "mutated_state", lambda state, other, rng: damaged(state, left_out))
    with pytest.raises(Damage, match="was taken"):
        through_api(tiny_model("llama"), seed=1, count=40)


def damaged(state, part):
    """A state whose seal has one wrong id, which it has too, or one wrong logit."""
    out, seal = copy.copy(state), state.llamahybrid
    changed = getattr(seal, part).copy()
    changed[3] += 1
    if part == "tokens":
        out.input_ids = state.input_ids.copy()
        out.input_ids[3] += 1
    out.llamahybrid = dataclasses.replace(seal, **{part: changed})
    return out


def test_a_crash_is_a_result(tiny_model, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif '--child' in sys.orig_argv: os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, failure = batch("api", tiny_model("mamba"), 1, 10)
    assert "died of signal 6" in failure


def test_a_refusal_that_changes_memory_is_found(tiny_model, monkeypatch):
    load = blob_fuzz._Way.load

    def clumsy(way, blob):
        read = load(way, blob)
        if not read:
            way._native.llama_memory_seq_rm(way._native.llama_get_memory(way._ctx), 0, -1, -1)
        return read

    monkeypatch.setattr(blob_fuzz._Way, "load", clumsy)
    monkeypatch.setattr(blob_fuzz, "mutated_bytes", lambda blob, other, rng: blob[: len(blob) // 2])
    with pytest.raises(Damage, match="changed memory"):
        at_the_library(tiny_model("llama"), seed=1, count=20)
