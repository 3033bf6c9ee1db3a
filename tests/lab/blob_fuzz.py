"""Blob campaigns: damaged, foreign and made-up state, through our API or straight at the C API.

``python -m tests.lab.blob_fuzz [--count 10000] [--seconds 600] [--seed 0] [--way native]``

Through the API every record that is not exactly what was saved here must be refused, and the next answer
must be right. As ``native`` the bytes go to the library itself, which must not die, and where it refuses
must be as before: that holds for the patched engine. Each batch runs in a process of its own, so that a crash
or a hang is a result. A `LlamaState` that stock saved carries no checksum: damage to it cannot be told, and
it is left out here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamahybrid import Llama, tiny
from llamahybrid.capi.gguf import Gguf
from llamahybrid.errors import SnapshotError
from llamahybrid.harness.hazards.context import FULL, ON_DEVICE, PARTIAL
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.memory.restore import restore
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.envelope import HEADER_BYTES
from tests.lab.campaign import main, silence
from tests.lab.differential import Mismatch
from tests.lab.reference import difference, output_row

Bytes = npt.NDArray[np.uint8]
ARCHITECTURES = ("qwen35", "jamba", "mamba", "lfm2", "gemma3", "llama")
BATCH = 100
HANG_SECONDS = 300
TOLERANCE = 1e-3
"""Of the logits' range: the prompt may have been cut into other batches in between."""

SHAPE: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = [(7 * i + 1) % 120 for i in range(90)]
OTHER = [(11 * i + 3) % 120 for i in range(90)]
VARIANTS: dict[str, dict[str, Any]] = {
    "other weights": {},
    "flash attention": {"flash_attn": True},
    "q8 keys": {"type_k": 8, "flash_attn": True},
    "window": {"swa_full": False},
    "no second sequence": {"paging": False},
    "larger context": {"n_ctx": 512},
}
"""Contexts whose sound records of the same tokens must be refused, by their difference."""


class Damage(AssertionError):
    """Something that must be refused was taken, or left wrong state behind."""


def mutated(record: Any, other: Any, rng: random.Random) -> Any:
    """A record with one to a few things wrong; never equal to it."""
    if isinstance(record, np.ndarray):
        return mutated_bytes(record, other, rng)
    return mutated_state(record, other, rng)


def mutated_state(state: Any, other: Any, rng: random.Random) -> Any:
    """A `LlamaState` with its bytes, its ids, its counts or its seal damaged, or another's seal."""
    out, seal = copy.copy(state), copy.copy(state.llamahybrid)
    match rng.choice(("bytes", "bytes", "ids", "tokens", "logits", "count", "size", "seal")):
        case "bytes":
            mine, theirs = (np.frombuffer(s.llama_state, np.uint8) for s in (state, other))
            out.llama_state = mutated_bytes(mine, theirs, rng).tobytes()
            out.llama_state_size = len(out.llama_state) if rng.random() < 0.8 else state.llama_state_size
        case "ids":
            out.input_ids = state.input_ids.copy()
            out.input_ids[rng.randrange(state.n_tokens)] ^= 1
        case "count":
            out.n_tokens = rng.choice((0, 1, state.n_tokens - 1, state.n_tokens + 1, 10**6, -1))
        case "size":
            out.llama_state_size += rng.choice((-1, 1, 1 << 20))
        case "seal":
            seal = other.llamahybrid
            if seal.checksum == state.llamahybrid.checksum:
                seal = dataclasses.replace(seal, checksum=1)
        case part:
            damaged = getattr(seal, part).copy()
            damaged.view(np.uint8)[rng.randrange(damaged.nbytes)] ^= 1 << rng.randrange(8)
            seal = dataclasses.replace(seal, **{part: damaged})
    out.llamahybrid = seal
    return out


def mutated_bytes(blob: Bytes, other: Bytes, rng: random.Random) -> Bytes:
    """`blob` with one to a few things wrong; never equal to it."""
    out, n, at = blob.copy(), len(blob), rng.randrange(len(blob))
    match rng.choice(("bit", "bit", "bytes", "word", "cut", "longer", "splice", "zeros", "header", "empty")):
        case "bit":
            for _ in range(rng.choice((1, 1, 8))):
                out[rng.randrange(n)] ^= 1 << rng.randrange(8)
        case "bytes":
            put(out, at, rng.randbytes(8))
        case "word":  # a count, a length, a type: the lengths that readers trust
            value = rng.choice((0, 1, 2, 255, 1 << 16, 0x7FFFFFFF, 0xFFFFFFFF, rng.randrange(1 << 32)))
            put(out, rng.randrange(max(1, min(n, 600) - 4)) & ~3, value.to_bytes(4, "little"))
        case "cut":
            out = out[:at]
        case "longer":
            out = np.frombuffer(out.tobytes() + rng.randbytes(rng.randint(1, 64)), np.uint8)
        case "splice":
            out = np.concatenate([out[:at], other[rng.randrange(len(other)) :]])
        case "zeros":
            out[at : at + rng.randint(1, 4096)] = 0
        case "header":
            size = min(n, HEADER_BYTES)
            out[:size] = other[:size] if len(other) >= HEADER_BYTES else 0
        case "empty":
            out = out[:0]
    return mutated_bytes(blob, other, rng) if np.array_equal(out, blob) else out


def put(out: Bytes, at: int, raw: bytes) -> None:
    """Write bytes over others, as far as there are any."""
    out[at : at + len(raw)] = np.frombuffer(raw, np.uint8)[: len(out) - at]


# -- through our API -----------------------------------------------------------------------------------


def through_api(model: Path, seed: int, count: int) -> Counter[str]:
    """Hand `count` wrong records to a `Llama`; what became of them.

    A third are sound but foreign: of another context, model or text, with the seal they were given there.
    The others are damaged, or in parts from two sources. A payload that was made up together with a fitting
    seal is out of scope: checksums tell damage, not intent.

    Raises:
        Damage: one was taken, or the next logits were not those of before.
    """
    rng, outcomes = random.Random(seed), Counter[str]()
    name = list(VARIANTS)[seed % len(VARIANTS)]
    weights = model
    if name == "other weights":
        with Gguf(model) as gguf:
            arch = str(gguf.read("")["general.architecture"])
        weights = tiny.make(arch, model.with_suffix(".other.gguf"), seed=7)

    with (
        closing(Llama(str(model), **SHAPE)) as llm,
        closing(Llama(str(weights), **{**SHAPE, **VARIANTS[name]})) as donor,
    ):
        foreign, elsewhere = _records(donor, PROMPT), _records(llm, OTHER)
        records = _records(llm, PROMPT)
        wanted = _answer(llm)
        for number in range(count):
            kind = rng.choice(list(records))
            source = rng.choice(("damaged", "damaged", "foreign", "other text"))
            sound = {"foreign": foreign, "other text": elsewhere}.get(source, {}).get(kind)
            wrong = mutated(records[kind], rng.choice((foreign, elsewhere)).get(kind, records[kind]), rng)
            llm.reset()
            llm.eval(PROMPT)
            where = f"{model.name}, seed {seed}, number {number}: {source} {kind} ({name})"
            try:
                taken = _hand_over(llm, kind, wrong if sound is None else sound)
            except (SnapshotError, RuntimeError) as error:
                outcomes[type(error).__name__] += 1
            else:
                if taken and (source != "other text" or kind != "state"):
                    raise Damage(f"{where} was taken")
                outcomes["taken" if taken else "fault"] += 1
            if not difference(_answer(llm), wanted) <= TOLERANCE:
                raise Damage(f"{where}: other logits after it")
    return outcomes


def _answer(llm: Any) -> npt.NDArray[np.float32]:
    """The logits at the end of one prompt, decoded from where it differs from `PROMPT` by a token."""
    with closing(llm.generate([*PROMPT, 5], temp=0.0)) as stream:
        next(stream)
        return output_row(llm.ctx, -1, llm.n_vocab())


def _records(llm: Any, tokens: list[int]) -> dict[str, Any]:
    """Every kind of stored state this model makes, of `tokens`; a whole state with its seal."""
    llm.reset()
    llm.eval(tokens)
    live = llm.runner.live
    out = {"state": llm.save_state()}
    if live.profile.needs_checkpoints:
        out["snapshot"] = live.snapshot(_buffer)
        if live.profile.pager is not None:
            out["segment"] = live.page_out(0, len(tokens), _buffer).record
    return out


def _buffer(n: int) -> Bytes:
    return np.empty(n, np.uint8)


def _hand_over(llm: Any, kind: str, record: Any) -> bool:
    """Try to make the model take a record; True if it did."""
    live, ids = llm.runner.live, np.array(PROMPT, np.int32)
    if kind == "state":
        llm.load_state(record)
        return True
    if kind == "snapshot":
        return restore(live, record, ids) is None
    return restore(live, live.snapshot(_buffer), ids, [Segment(0, len(PROMPT), record)], 0) is None


# -- straight at the library ---------------------------------------------------------------------------


WAYS = {
    "sequence": FULL,
    "partial": PARTIAL,
    "device": FULL | ON_DEVICE,
    "partial device": PARTIAL | ON_DEVICE,
    "whole": None,
}
"""Ways to save a state, and the flags of those of a sequence."""


def at_the_library(model: Path, seed: int, count: int) -> Counter[str]:
    """Hand `count` mutated states to the C API: nothing may die, and a refused one changes nothing.

    Raises:
        Damage: a refused load left other bytes or other logits behind.
    """
    rng, outcomes, where = random.Random(seed), Counter[str](), f"{model.name}, seed {seed}"
    swa = {"swa_full": False} if rng.random() < 0.5 else {}
    context = ModelUnderTest(str(model)).context(n_ctx=SHAPE["n_ctx"], **swa)

    def save(way: str) -> Bytes:
        flags = WAYS[way]
        return np.frombuffer(context.save_whole() if flags is None else context.save(0, flags), np.uint8)

    def load(way: str, blob: Bytes) -> bool:
        flags = WAYS[way]
        raw = blob.tobytes()
        return context.load_whole(raw) if flags is None else context.read(raw, 0, flags) > 0

    end = len(PROMPT)
    context.grown(end, text=1)
    others = {way: save(way) for way in WAYS}
    context.rm(0, -1, -1)
    context.grown(end)
    sound = {way: save(way) for way in WAYS}
    context.feed(end, end + 1)
    wanted = context.logits()
    if not load("whole", sound["whole"]):
        raise Damage(f"{where}: the library does not read its own state")
    for number in range(count):
        way = rng.choice(list(WAYS))
        if "device" in way:
            sound[way] = save(way)  # only the last one of a sequence is kept
        before = save("whole")
        if load(way, mutated_bytes(sound[way], others[way], rng)):
            outcomes["taken"] += 1
            context.feed(end, end + 1)  # whatever was taken is decoded on, or refused
            if not load("whole", sound["whole"]):
                raise Damage(f"{where}, number {number}: no way back after {way}")
        else:
            outcomes["refused"] += 1
            if not np.array_equal(save("whole"), before):
                raise Damage(f"{where}, number {number}: refused {way} changed memory")
    context.feed(end, end + 1)
    if not difference(context.logits(), wanted) <= TOLERANCE:
        raise Damage(f"{where}: other logits after {count} records")
    return outcomes


# -- the campaign --------------------------------------------------------------------------------------

TARGETS: dict[str, Callable[[Path, int, int], Counter[str]]] = {
    "api": through_api,
    "native": at_the_library,
}


def batch(target: str, model: Path, seed: int, count: int) -> tuple[Counter[str], str]:
    """Run one batch in a process of its own: outcomes, and what went wrong if anything did."""
    child = f"from tests.lab.blob_fuzz import child; child({target!r}, {str(model)!r}, {seed}, {count})"
    command = [sys.executable, "-c", child]
    where = f"{model.name}, seed {seed}"
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Counter(), f"{where}: hangs"
    if run.returncode < 0:
        return Counter(), f"{where}: died of signal {-run.returncode}: {run.stderr[-500:]}"
    if run.returncode:
        return Counter(), f"{where}: {run.stderr[-1500:]}"
    return Counter(json.loads(run.stdout.splitlines()[-1])), ""


def play(model: Path, target: str, seed: int, count: int, until: float) -> dict[str, object]:
    """Batches until the time is up, one at least."""
    total = Counter[str]()
    for each in range(seed, seed + -(-count // BATCH)):
        outcomes, failure = batch(target, model, each, BATCH)
        total += outcomes
        if failure:
            raise Mismatch(failure)
        if time.monotonic() >= until:
            break
    return {"records": total.total(), "by what became of them": dict(total)}


def child(target: str, model: str, seed: int, count: int) -> None:
    """Play one batch in this process; print the outcomes."""
    silence()
    print(json.dumps(TARGETS[target](Path(model), seed, count)))


if __name__ == "__main__":
    main(play, ARCHITECTURES, ("api",))
