"""Restores of files, of states that do not fit, over shared cells, and without memory."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import FULL, PARTIAL, TWO, Context, after_failure, still_there
from llamahybrid.harness.hazards.effect import (
    Behaviour,
    Effect,
    NotApplicable,
    all_sound,
    refused,
    went_on,
    wrong,
)
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.harness.hazards.process import memory_left

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _File:
    """A state in a file: of sequence 0, or of the whole context."""

    def __init__(self, folder: str, whole: bool) -> None:
        self.path = Path(folder) / "state"
        self._save = lib.llama_state_save_file if whole else lib.llama_state_seq_save_file
        self._load = lib.llama_state_load_file if whole else lib.llama_state_seq_load_file
        self._to = (str(self.path).encode(), *(() if whole else (0,)), (lib.llama_token * 64)())

    def save(self, context: Context) -> None:
        """Write it, with four prompt tokens."""
        if not self._save(context.ctx, *self._to, 4):
            raise RuntimeError("the state was not written")

    def load(self, context: Context) -> bool:
        """Return the library's result of reading it."""
        return bool(self._load(context.ctx, *self._to, 64, ctypes.byref(ctypes.c_size_t())))


@probe("A damaged state file over a live sequence", "llama_context::state_seq_load_file")
def failed_file_restore(tested: ModelUnderTest) -> Effect:
    """Twenty live tokens; files of thirty others, of a sequence and whole; go on at twenty.

    They lack 8 bytes, 2,000 bytes, all but 60, or have eight more. A sound file is restored first.
    """
    context = tested.context().grown(20)
    before = context.save()
    donor = tested.context().grown(30, text=3)
    for whole in (False, True):
        with tempfile.TemporaryDirectory(prefix="llamahybrid-hazard-") as folder:
            file = _File(folder, whole)
            file.save(donor)
            good = file.path.read_bytes()
            other = tested.context().grown(5)
            if not file.load(other) or other.save() != donor.save():
                return wrong("a sound file was refused")
            for damaged in (good[:-8], good[:-2000], good[:60], good + b"\0" * 8):
                file.path.write_bytes(damaged)
                if file.load(context):
                    return wrong(f"{len(damaged)} of {len(good)} bytes were accepted")
    return still_there(context, before, 20, "8 restores returned 0")


@probe("A state file that loses its end while its data is read", "llama_context::state_seq_load_file")
def file_shrinks(tested: ModelUnderTest) -> Effect:
    """Two sequences; restore a file over the first, cut it before its last tensor is read; start again.

    Again with a file of the whole context. A message in the log gives the moment between parsing and reading;
    state replaced by then is lost.
    """
    if sys.platform == "win32":
        raise NotApplicable("a file that is open cannot be cut here")
    return all_sound(_shrinking(tested, whole) for whole in (False, True))


def _shrinking(tested: ModelUnderTest, whole: bool) -> Effect:
    donor = tested.context(**TWO).grown(200, text=3)
    context = tested.context(**TWO).filled({0: 20, 1: 15})
    beside = context.save(1)
    with tempfile.TemporaryDirectory(prefix="llamahybrid-hazard-") as folder:
        file = _File(folder, whole)
        file.save(donor)
        end = file.path.stat().st_size - 256

        def log(_level: int, text: bytes, _data: object) -> None:
            if b"cell_count" in text or b"reading memory" in text:
                os.truncate(file.path, end)

        callback = _LOG(log)
        lib.llama_log_set(callback, None)
        read = file.load(context)
        lib.llama_log_set(_LOG(), None)
        if file.path.stat().st_size != end:
            raise NotApplicable("the library does not say when it has parsed a file")
    if read:
        return wrong("a file that lost its end was accepted")
    ends = context.last_of()
    said = f"the restore returned 0, the sequences end at {ends}"
    if not whole and context.save(1) != beside:
        return wrong(f"{said}, the second one with other bytes")
    if ends[0] >= 0:
        return refused(context.goes_on(ends[0] + 1), said)
    return refused(context.starts_over(20, text=2), said)


def _over(context: Context, blob: bytes, flags: int, what: str, seq: int = 0) -> Effect:
    """Offer a blob that does not belong here over twenty live tokens of sequence 0, and go on with them."""
    before = context.save()
    if context.load(blob, seq, flags):
        return went_on(context.goes_on(20), f"{what} was accepted")
    return still_there(context, before, 20, f"{what} was refused")


@probe("A state with more cells than the context has", "llama_kv_cache::state_read_meta")
def restore_too_long(tested: ModelUnderTest) -> Effect:
    """n_ctx = 256; twenty live tokens; restore the state of 400 others; go on at twenty."""
    tested.need("attention")
    blob = tested.context().grown(400, text=3).save()
    return _over(tested.context(n_ctx=256).grown(20), blob, FULL, "a state of 400 tokens")


@probe("A state whose attention has another number type", "llama_kv_cache::state_read_data")
def restore_other_type(tested: ModelUnderTest) -> Effect:
    """Twenty live tokens in F16; restore the state of thirty others that were computed in F32; go on."""
    tested.need("attention")
    blob = tested.context(type_k=0, type_v=0).grown(30, text=3).save()
    return _over(tested.context().grown(20), blob, FULL, "a state in F32")


@probe("A full state restored as PARTIAL, and the other way round", "llama_context::state_seq_set_data")
def restore_other_flags(tested: ModelUnderTest) -> Effect:
    """Twenty live tokens; offer states of thirty others under the wrong flags; go on at twenty."""
    tested.need("hybrid")
    donor = tested.context().grown(30, text=3)
    return all_sound(
        _over(tested.context().grown(20), donor.save(flags=saved), offered, said)
        for saved, offered, said in ((FULL, PARTIAL, "full as PARTIAL"), (PARTIAL, FULL, "PARTIAL as full"))
    )


@probe("A state restored over a sequence that shares its cells", "llama_kv_cache::state_read")
def restore_beside_copy(tested: ModelUnderTest) -> Effect:
    """Twenty tokens, copied to a second sequence; restore thirty others over the first; go on with both.

    Again with a state that lacks its last eight bytes.
    """
    blob = tested.context(**TWO).grown(30, text=3).save()

    def beside(offered: bytes) -> Effect:
        context = tested.context(**TWO).grown(20)
        context.cp(0, 1)
        read = context.load(offered)
        said = f"the restore returned {'success' if read else 0}"
        copied = went_on(context.goes_on(20, 1), f"{said}, the copy goes on")
        if not read and context.last() < 19:
            return copied
        restored = context.goes_on(30, text=3) if read else context.goes_on(20)
        return all_sound((copied, went_on(restored, f"{said}, both go on")))

    return all_sound(beside(offered) for offered in (blob, blob[:-8]))


@probe("A state restored over a pending rollback", "llama_memory_recurrent::state_read")
def restore_over_rollback(tested: ModelUnderTest) -> Effect:
    """Four planes; twelve tokens, of which two are rolled back; restore twenty of another text; go on."""
    blob = tested.with_planes().grown(20, text=3).save()
    context = tested.with_planes().grown(12)
    context.rm(0, 10, -1)
    if not context.load(blob):
        return wrong("a sound state was refused")
    return went_on(context.goes_on(20, text=3), "the restore returned success")


@probe("No memory for a restore", "llama_kv_cache::state_read")
def restore_no_memory(tested: ModelUnderTest) -> Effect:
    """2,000 live tokens; restore as many others with 0 and with 256 KiB left to the process; go on."""
    tested.need_memory_limit()
    shape: dict[str, Any] = {"n_ctx": 2048, "n_batch": 2048}
    blob = tested.context(**shape).grown(2000, text=1, chunk=2000).save()
    buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)

    def restored(left: int) -> Effect:
        context = tested.context(**shape).grown(2000, chunk=2000)
        with memory_left(left):
            read = lib.llama_state_seq_set_data_ext(context.ctx, buffer, len(blob), 0, FULL)
        if read:
            return went_on(context.goes_on(2000, text=1), f"{left >> 10} KiB: the restore returned success")
        return after_failure(context, 2000)

    effect = all_sound(restored(left) for left in (0, 1 << 18))
    if not effect.behaviour.sound:
        return effect
    # how much suffices depends on what the process has freed before
    return Effect(Behaviour.EXACT, "each restore succeeded, or was refused without damage", effect.difference)
